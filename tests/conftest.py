"""One thread per process, how hard hypothesis tries (``HYPOTHESIS_PROFILE=deep`` for more), and a tiny model."""

import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

import dkv

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


metal_runs = []  # launches by kernel and signatures of each process of a test run


def pytest_sessionfinish(session):
    """A process of several tells what ran of the Metal kernels on the CPU."""
    ran = sys.modules.get("metal_host")
    if ran is not None:
        metal_runs.append(ran.counts())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["metal"] = ran.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if "metal" in getattr(node, "workeroutput", {}):
        metal_runs.append(node.workeroutput["metal"])


def pytest_terminal_summary(terminalreporter):
    """What ran of the Metal kernels on the CPU."""
    if any(launches for launches, _ in metal_runs):
        import metal_host

        terminalreporter.write_line(metal_host.summary(metal_runs))


@pytest.fixture(autouse=True)
def metal_on_the_cpu(request):
    """A test whose ``backend`` is "mlx-metal" runs its kernels by the host where Metal is not found."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("backend") != "mlx-metal" or dkv.available_backends()["mlx-metal"] is None:
        yield
        return
    import metal_host

    if metal_host.msl_host.unavailable() is not None:
        pytest.skip(metal_host.msl_host.unavailable())
    with metal_host.metal("plain"):
        yield


@pytest.fixture
def quiet():
    """No gradients, and nothing of names that libraries will drop."""
    torch = pytest.importorskip("torch")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture
def small_prices(monkeypatch):
    """Passages that a tiny model reads in no time: 8 sink tokens, blocks of 16, a window of 16, 24 new tokens."""
    sensitivity = pytest.importorskip("dkv.sensitivity")
    for name, value in {"SINK": 8, "BLOCK": 16, "WINDOW": 16, "LENGTH": 24, "COPY_START": 4}.items():
        monkeypatch.setattr(sensitivity, name, value)
    return sensitivity


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random two-layer model and a tokenizer of one token per byte."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tiny")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
