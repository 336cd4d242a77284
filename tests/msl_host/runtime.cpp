// Runs a kernel: one fiber per Metal thread, one threadgroup after another, all on the calling thread.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

using msl::Site;
using msl::Thread;
using Entry = void (*)(void* const* buffers, const Thread* thread);

const Launch* launch;
Fiber* current;
uint32_t group, now;
Fence group_fence, simd_fence[MAX_THREADS / SIMD];
char* arena;
Placed placed[256];
uint32_t num_placed;
uintptr_t watched;
const Site* watched_site;

static Launch* results;
static Entry entry;
static void* buffers[MAX_BUFFERS + 1];
static Fiber* fibers;
static uint32_t num_threads, lanes_of[MAX_THREADS / SIMD];
static size_t variables_end, variables_bytes;
static Context scheduler;
static bool stopped;
static uint32_t random_state;

void report(const Site* site, uintptr_t address, const char* format, ...) {
  results->errors++;
  size_t used = strlen(launch->text), left = launch->capacity - used;
  if (left < 1024) return;
  char* text = launch->text + used;
  text += snprintf(text, 512, "%s\t%u\t%lx\t", site ? site->_M_file_name : "", site ? site->_M_line : 0, address);
  va_list arguments;
  va_start(arguments, format);
  text += vsnprintf(text, 480, format, arguments) < 480 ? strlen(text) : 479;
  va_end(arguments);
  text[0] = '\n', text[1] = 0;
}

// ---- what kernels call

static void to_scheduler() { switch_context(current->context, scheduler); }

void stop() {
  stopped = true;
  to_scheduler();
  abort();
}

static void wait(State state, const void* site) {
  memory_settle();
  current->state = state;
  current->site = (const Site*)site;
  to_scheduler();
}

extern "C" void msl_barrier(bool threadgroup, unsigned flags, const void* site) {
  current->flags = flags;
  current->compute = nullptr;
  wait(threadgroup ? THREADGROUP_BARRIER : SIMDGROUP_BARRIER, site);
}

extern "C" void msl_collective(msl::Collective compute, void* operand, uint32_t argument, const void* site) {
  current->compute = compute;
  current->operand = operand;
  current->argument = argument;
  wait(COLLECTIVE, site);
}

extern "C" const Thread* msl_thread() { return &current->thread; }

extern "C" void msl_fail(const char* what) {
  if (!stopped) report(current->site, 0, "%s, threadgroup %u", what, group);
  stopped = true;
}

extern "C" void* msl_threadgroup(const msl::Variable* variable) {
  for (uint32_t i = 0; i < num_placed; i++)
    if (placed[i].variable == variable) return arena + placed[i].offset;
  size_t align = variable->align < 16 ? 16 : variable->align;
  size_t offset = (variables_end + align - 1) / align * align;
  variables_end = offset + variable->bytes + (launch->check ? 128 : 0);  // a gap shows what runs over an end
  variables_bytes += variable->bytes;
  if (variables_bytes > THREADGROUP_MEMORY || num_placed == sizeof placed / sizeof *placed) {
    report(nullptr, (uintptr_t)__builtin_return_address(0), "threadgroup memory: %zu bytes with '%s', %u are there",
           variables_bytes, variable->name, THREADGROUP_MEMORY);
    stop();
  }
  placed[num_placed++] = {variable, offset};
  return arena + offset;
}

// ---- the scheduler

static void fiber_main() {
  entry(buffers, &current->thread);
  memory_settle();
  current->state = RETURNED;
  to_scheduler();
  abort();
}

static uint32_t random_number() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  return random_state ^= random_state << 5;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static bool together(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.compute == b.compute &&
         (a.site == b.site || (a.site->_M_line == b.site->_M_line && a.site->_M_column == b.site->_M_column &&
                               !strcmp(a.site->_M_file_name, b.site->_M_file_name)));
}

static void report_divergence(const char* what, uint32_t begin, uint32_t end) {
  static const char* names[] = {"ready", "a simd operation", "simdgroup_barrier", "threadgroup_barrier", "returned"};
  char text[400] = "";
  bool told[MAX_THREADS] = {};
  const Site* site = nullptr;
  for (uint32_t i = begin; i < end; i++) {
    const Fiber& fiber = fibers[i];
    if (told[i]) continue;
    uint32_t count = 0;
    for (uint32_t j = i; j < end; j++) {
      bool same = fiber.state == RETURNED ? fibers[j].state == RETURNED : together(fiber, fibers[j]);
      if (same) told[j] = true, count++;
    }
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%s%u from thread %u %s", used ? ", " : "", count, i, names[fiber.state]);
    used = strlen(text);
    if (fiber.state == RETURNED) continue;
    if (!site) site = fiber.site;
    snprintf(text + used, sizeof text - used, " in line %u", fiber.site->_M_line);
  }
  report(site, 0, "%s in threadgroup %u: %s", what, group, text);
  stopped = true;
}

static void pass_fence(Fence& fence, uint32_t flags) {
  now++;
  if (flags & 1) fence.device = now;
  if (flags & 2) fence.threadgroup = now;
}

// Lets every ready thread of a simd-group run until it waits; true where any did.
static bool run_ready(uint32_t begin, uint32_t end) {
  uint32_t count = end - begin, first = launch->seed ? random_number() % count : 0;
  bool backwards = launch->seed && random_number() & 1, any = false;
  for (uint32_t k = 0; k < count && !stopped; k++) {
    Fiber& fiber = fibers[begin + (first + (backwards ? count - k : k)) % count];
    if (fiber.state != READY) continue;
    any = true;
    current = &fiber;
    results->switches++;
    switch_context(scheduler, fiber.context);
    if (fiber.state == RETURNED) lanes_of[fiber.thread.simdgroup] &= ~(1u << fiber.thread.lane);
  }
  return any;
}

// Runs a simd-group until all its threads wait at a threadgroup barrier or have returned; true where any ran.
static bool run_simdgroup(uint32_t simdgroup) {
  uint32_t begin = simdgroup * SIMD, end = begin + SIMD < num_threads ? begin + SIMD : num_threads;
  for (bool any = false;; any = true) {
    bool ran = run_ready(begin, end);
    if (stopped) return true;
    Fiber* first = nullptr;
    uint32_t lanes = 0;
    bool meet = true;
    for (uint32_t i = begin; i < end; i++) {
      if (fibers[i].state != COLLECTIVE && fibers[i].state != SIMDGROUP_BARRIER) continue;
      if (!first) first = &fibers[i];
      meet &= together(*first, fibers[i]);
      lanes |= 1u << (i - begin);
    }
    if (!first) return any || ran;
    bool complete = lanes == (launch->allow_returned ? lanes_of[simdgroup] : ~0u >> (SIMD - (end - begin)));
    if (!meet || !complete) {
      report_divergence("divergent simd-group operation", begin, end);
      return true;
    }
    if (first->state == SIMDGROUP_BARRIER) {
      pass_fence(simd_fence[simdgroup], first->flags);
    } else {
      void* operands[SIMD] = {};
      uint32_t arguments[SIMD] = {};
      for (uint32_t i = begin; i < end; i++) {
        operands[i - begin] = fibers[i].operand;
        arguments[i - begin] = fibers[i].argument;
      }
      current = first;
      first->compute(operands, arguments, lanes);
      if (stopped) return true;
    }
    for (uint32_t i = begin; i < end; i++)
      if (lanes >> (i - begin) & 1) fibers[i].state = READY;
    if (launch->seed && random_number() & 1) return true;
  }
}

static void run_group() {
  uint32_t simdgroups = (num_threads + SIMD - 1) / SIMD;
  memset(simd_fence, 0, sizeof simd_fence);
  group_fence = {};
  if (variables_end && !launch->check) memset(arena, 0xff, variables_end);
  for (uint32_t i = 0; i < num_threads; i++) {
    fibers[i].state = READY, fibers[i].site = nullptr;
    start_context(fibers[i].context, fibers[i].stack, fiber_main);
  }
  for (uint32_t s = 0; s < simdgroups; s++) {
    uint32_t count = least(SIMD, num_threads - s * SIMD);
    lanes_of[s] = ~0u >> (SIMD - count);
  }
  for (;;) {
    bool any = false;
    uint32_t first = launch->seed ? random_number() % simdgroups : 0;
    for (uint32_t k = 0; k < simdgroups; k++) {
      any |= run_simdgroup((k + first) % simdgroups);
      if (stopped) return;
    }
    if (any) continue;
    uint32_t returned = 0;
    Fiber* waiting = nullptr;
    bool meet = true;
    for (uint32_t i = 0; i < num_threads; i++) {
      if (fibers[i].state == RETURNED) returned++;
      else if (!waiting) waiting = &fibers[i];
      else meet &= together(*waiting, fibers[i]);
    }
    if (!waiting) return;
    if (!meet || (returned && !launch->allow_returned)) {
      report_divergence("threadgroup_barrier not reached by all threads", 0, num_threads);
      return;
    }
    pass_fence(group_fence, waiting->flags);
    for (uint32_t i = 0; i < num_threads; i++)
      if (fibers[i].state == THREADGROUP_BARRIER) fibers[i].state = READY;
  }
}

static void place_group(msl::Size at, msl::Size groups) {
  const uint32_t *grid = launch->grid, *size = launch->group;
  msl::Size edge = {least(size[0], grid[0] - at.x * size[0]), least(size[1], grid[1] - at.y * size[1]),
                    least(size[2], grid[2] - at.z * size[2])};
  num_threads = edge.x * edge.y * edge.z;
  for (uint32_t i = 0; i < num_threads; i++) {
    Thread& thread = fibers[i].thread;
    thread.in_group = {i % edge.x, i / edge.x % edge.y, i / edge.x / edge.y};
    thread.in_grid = {at.x * size[0] + thread.in_group.x, at.y * size[1] + thread.in_group.y,
                      at.z * size[2] + thread.in_group.z};
    thread.group = at, thread.groups = groups, thread.group_size = edge;
    thread.grid_size = {grid[0], grid[1], grid[2]}, thread.nominal = {size[0], size[1], size[2]};
    thread.index = i, thread.lane = i % SIMD, thread.simdgroup = i / SIMD;
    thread.simdgroups = (num_threads + SIMD - 1) / SIMD;
  }
}

static void run_grid() {
  msl::Size groups;
  uint32_t* count = &groups.x;
  for (int k = 0; k < 3; k++) count[k] = (launch->grid[k] + launch->group[k] - 1) / launch->group[k];
  group = 0;
  for (uint32_t z = 0; z < groups.z; z++)
    for (uint32_t y = 0; y < groups.y; y++)
      for (uint32_t x = 0; x < groups.x; x++, group++) {
        place_group({x, y, z}, groups);
        run_group();
        if (stopped) return;
      }
}

// ---- faults: signals raised by the kernel become errors

static sigjmp_buf out_of_kernel;
static pid_t kernel_thread;
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
static struct sigaction previous[4];

static void report_fault(uintptr_t pc, const siginfo_t* info) {
  uintptr_t offset = (uintptr_t)info->si_addr - (uintptr_t)arena, within = offset % SLOT;
  uint32_t slot = offset / SLOT, thread = current->thread.index;
  if (offset < SLOT) {
    report(nullptr, pc, "threadgroup memory out of bounds at byte %zu by thread %u of threadgroup %u", within, thread,
           group);
  } else if (offset < SLOT * (launch->num_buffers + 1)) {
    const Buffer& buffer = launch->buffers[slot - 1];
    long at = (long)(arena + offset - (char*)buffers[slot - 1]);
    bool inside = at >= 0 && (size_t)at < buffer.bytes;
    report(nullptr, pc, "%s: '%s'[%ld] of %zu by thread %u of threadgroup %u",
           inside ? "write to an input" : "out of bounds", buffer.name, at / (long)buffer.item,
           buffer.bytes / buffer.item, thread, group);
  } else {
    const char* address = (const char*)info->si_addr;
    bool deep = address >= current->stack - PAGE && address < current->stack;
    report(nullptr, pc, "%s by thread %u of threadgroup %u",
           deep ? "more than 64 KiB of private memory" : "access to no memory, or misaligned", thread, group);
  }
}

static void on_signal(int number, siginfo_t* info, void* context) {
  if (syscall(SYS_gettid) != kernel_thread) {  // not ours: what would have happened without us
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  uintptr_t pc = 0;
#ifdef __x86_64__
  pc = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP] + 1;
#endif
  if (number == SIGVTALRM) {
    report(watched_site ? watched_site : current->site, launch->check ? watched : pc,
           "still running after %g s: an endless loop?", launch->timeout);
  } else if (number == SIGFPE) {
    report(nullptr, pc, "integer division by zero by thread %u of threadgroup %u", current->thread.index, group);
  } else {
    report_fault(pc, info);
  }
  siglongjmp(out_of_kernel, 1);
}

static void run_guarded() {
  static char alternate[65536];
  stack_t stack = {}, previous_stack;
  stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &previous[i]);
  kernel_thread = syscall(SYS_gettid);
  sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGVTALRM;
  event._sigev_un._tid = kernel_thread;
  timer_t timer;
  timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
  itimerspec after = {};
  after.it_value = {(time_t)launch->timeout, (long)((launch->timeout - (time_t)launch->timeout) * 1e9)};
  timer_settime(timer, 0, &after, nullptr);
#ifdef __x86_64__
  unsigned mode = __builtin_ia32_stmxcsr();
  if (launch->flush) __builtin_ia32_ldmxcsr(mode | 0x8040);  // subnormal results and operands are 0
#endif
  if (!sigsetjmp(out_of_kernel, 1)) run_grid();
#ifdef __x86_64__
  __builtin_ia32_ldmxcsr(mode);
#endif
  timer_delete(timer);
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

// ---- a launch

static bool reserve() {
  if (fibers) return true;
  auto map = [](size_t bytes, int access) {
    return (char*)mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  arena = map(SLOT * SLOTS, PROT_NONE);
  char* stacks = map(MAX_THREADS * (STACK + PAGE), PROT_READ | PROT_WRITE);
  if (arena == MAP_FAILED || stacks == MAP_FAILED) return false;
  mprotect(arena, 4 * THREADGROUP_MEMORY, PROT_READ | PROT_WRITE);
  fibers = (Fiber*)calloc(MAX_THREADS, sizeof(Fiber));
  for (uint32_t i = 0; i < MAX_THREADS; i++) {
    mprotect(stacks + i * (STACK + PAGE), PAGE, PROT_NONE);
    fibers[i].stack = stacks + i * (STACK + PAGE) + PAGE;
  }
  return true;
}



// A buffer ends where its pages end, up to 16 bytes: what runs over the end faults even without the checks.
static void place_buffer(uint32_t i) {
  const Buffer& buffer = launch->buffers[i];
  char* pages = arena + SLOT * (i + 1) + BUFFER_START;
  size_t size = whole_pages(buffer.bytes);
  if (size) mprotect(pages, size, PROT_READ | PROT_WRITE);
  buffers[i] = pages + (size - buffer.bytes) / 16 * 16;
  memset(pages, 0xff, size);
  if (buffer.kind != OUTPUT) memcpy(buffers[i], buffer.data, buffer.bytes);
  if (buffer.kind == INPUT && size) mprotect(pages, size, PROT_READ);
}

static void return_buffer(uint32_t i) {
  const Buffer& buffer = launch->buffers[i];
  char* pages = arena + SLOT * (i + 1) + BUFFER_START;
  if (buffer.kind != INPUT) memcpy(buffer.data, buffers[i], buffer.bytes);
  if (!buffer.bytes) return;
  madvise(pages, whole_pages(buffer.bytes), MADV_DONTNEED);
  mprotect(pages, whole_pages(buffer.bytes), PROT_NONE);
}

extern "C" int msl_launch(Entry kernel, Launch* to_run) {
  if (!reserve()) return 1;
  launch = results = to_run;
  entry = kernel;
  stopped = false;
  now = 1;
  num_placed = 0;
  variables_end = variables_bytes = 0;
  random_state = launch->seed * 2654435761u + 1;
  if (!launch->check) memset(arena, 0xff, 2 * THREADGROUP_MEMORY);
  for (uint32_t i = 0; i < launch->num_buffers; i++) place_buffer(i);
  memory_begin();
  run_guarded();
  memory_end();
  current = nullptr;
  for (uint32_t i = 0; i < launch->num_buffers; i++) return_buffer(i);
  results->threadgroup_bytes = variables_bytes;
  return 0;
}
