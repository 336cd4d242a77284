"""Threads: caches of their own give what one thread gives; one cache between two is refused and stays whole."""

from __future__ import annotations

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from synthetic import MODELS
from test_lifecycle import EXACT, IDS, everything, feed, same

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from dkv.integrations.transformers import DKVCache, attach  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture(params=sorted(MODELS))
def model(request):
    torch.manual_seed(0)
    return attach(AutoModelForCausalLM.from_config(MODELS[request.param]()).eval().requires_grad_(False), EXACT)


class Held:
    """A thread that runs ``call`` and waits before a module's forward until :meth:`go_on`."""

    def __init__(self, module, call, interrupted=False):
        self.reached, self.free, self.interrupted = threading.Event(), threading.Event(), interrupted
        self.pool = ThreadPoolExecutor(1)
        self.thread = self.pool.submit(threading.current_thread).result()
        self.hook = module.register_forward_pre_hook(self.wait)
        self.future = self.pool.submit(call)
        assert self.reached.wait(60)

    def wait(self, *arguments):
        if threading.current_thread() is self.thread and not self.free.is_set():
            self.reached.set()
            assert self.free.wait(60)
            if self.interrupted:
                raise KeyboardInterrupt

    def go_on(self):
        self.free.set()
        try:
            return self.future.result(60)
        finally:
            self.hook.remove()
            self.pool.shutdown()


def test_a_cache_for_each_thread(model):
    def run(start):
        cache = DKVCache(model)
        outs = [model(IDS[:, start : start + 90], past_key_values=cache).logits]
        for at in range(start + 90, start + 110):
            outs.append(model(IDS[:, at : at + 1], past_key_values=cache).logits)
        return torch.cat(outs, dim=1)

    starts = [0, 40, 80, 120]
    alone = [run(start) for start in starts]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(alone, pool.map(run, starts)):
            assert torch.equal(one, other)


def test_one_cache_in_two_threads_is_refused_and_stays_whole(model, tmp_path):
    cache = DKVCache(model)
    feed(model, cache, 100)
    before = copy.deepcopy(cache)
    held = Held(model.model.layers[2], lambda: feed(model, cache, 30))
    tries = {
        "a step": lambda: model(IDS[:, 100:101], past_key_values=cache),
        "reset": cache.reset,
        "crop": lambda: cache.crop(-1),
        "compress": cache.compress,
        "configure": lambda: cache.configure(EXACT),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "repeat": lambda: cache.batch_repeat_interleave(2),
        "select": lambda: cache.batch_select_indices(torch.tensor([0])),
        "save": lambda: cache.save(str(tmp_path / "cache")),
        "load": lambda: cache.load(str(tmp_path / "cache")),
        "copy": lambda: copy.deepcopy(cache),
    }
    for name, call in tries.items():
        with pytest.raises(RuntimeError, match="in use by another thread"):
            call()
            pytest.fail(name)
    assert torch.equal(held.go_on(), feed(model, before, 30))
    assert torch.equal(feed(model, cache, 20), feed(model, before, 20))  # and this thread may have it now
    assert same(everything(cache), everything(before))


def test_positions_of_a_length_that_has_passed_are_refused(model):
    cache = DKVCache(model)
    feed(model, cache, 60)
    held = Held(model.model.layers[0], lambda: model(IDS[:, 60:61], past_key_values=cache))  # it has its positions
    feed(model, cache, 5)
    before = everything(cache)
    with pytest.raises(RuntimeError, match="had seen 60 positions when this thread asked and has seen 65 now"):
        held.go_on()
    assert same(everything(cache), before)
    other = DKVCache(model)
    feed(model, other, 60, 5)
    assert torch.equal(feed(model, cache, 3), feed(model, other, 3))


def test_threads_that_fight_for_one_cache_lose_steps_and_nothing_else(model):
    cache = DKVCache(model)
    feed(model, cache, 60)
    token, refused, done = IDS[:, :1], [], []

    def run(_):
        for _ in range(25):
            try:
                model(token, past_key_values=cache)
                done.append(1)
            except RuntimeError as error:
                assert "thread" in str(error)
                refused.append(1)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert len(done) + len(refused) == 75 and done
    other = DKVCache(model)
    feed(model, other, 60)
    for _ in done:
        model(token, past_key_values=other)
    assert same(everything(cache), everything(other))


def test_a_step_that_was_interrupted_in_another_thread(model):
    cache = DKVCache(model)
    feed(model, cache, 60)
    held = Held(model.model.layers[2], lambda: feed(model, cache, 1), interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        held.go_on()  # and its thread has ended
    with pytest.raises(RuntimeError, match="have seen different tokens"):
        feed(model, cache, 1)
    cache.reset()
    other = DKVCache(model)
    assert torch.equal(feed(model, cache, 60), feed(model, other, 60))
