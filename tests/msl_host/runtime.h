// State that the scheduler (runtime.cpp) and the memory checks (memory.cpp) share, and what Python passes to a launch.
#pragma once
#include "fiber.h"
#include "metal/runtime.h"

enum Kind : uint32_t { INPUT, OUTPUT, INITIALISED_OUTPUT };
struct Buffer {
  void* data;
  size_t bytes;
  uint32_t item;
  Kind kind;
  const char* name;
};
struct Launch {
  uint32_t grid[3], group[3];
  uint32_t num_buffers;
  const Buffer* buffers;
  uint32_t seed, check, allow_returned, flush;
  double timeout;
  uint64_t threadgroup_bytes, switches, errors;  // from here on results
  char* text;                                    // one error a line: file TAB line TAB address TAB message
  size_t capacity;
};

enum State { READY, COLLECTIVE, SIMDGROUP_BARRIER, THREADGROUP_BARRIER, RETURNED };
struct Fiber {
  Context context;
  char* stack;
  msl::Thread thread;
  State state;
  const msl::Site* site;  // of the operation it waits in
  msl::Collective compute;
  void* operand;
  uint32_t argument, flags;
};

constexpr uint32_t MAX_THREADS = 1024, SIMD = 32, MAX_BUFFERS = 31, THREADGROUP_MEMORY = 32768;

// Threadgroup memory and every buffer lie in slots of 4 GiB of which all but their own pages cannot be touched.
constexpr uint64_t SLOT = 1ull << 32, BUFFER_START = 1 << 20, SLOTS = MAX_BUFFERS + 2;

struct Fence {  // the time of the latest barrier for device memory and for threadgroup memory
  uint32_t device, threadgroup;
};
struct Placed {  // a threadgroup variable of this launch
  const msl::Variable* variable;
  size_t offset;
};

extern const Launch* launch;
extern Fiber* current;     // the running thread
extern uint32_t group;     // its threadgroup's number
extern uint32_t now;       // counts barriers
extern Fence group_fence, simd_fence[MAX_THREADS / SIMD];
extern char* arena;        // the slots
extern Placed placed[256];
extern uint32_t num_placed;
extern uintptr_t watched;  // where the latest watched access came from, or
extern const msl::Site* watched_site;

inline size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void report(const msl::Site* site, uintptr_t address, const char* format, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void stop();  // the launch, from within a fiber

void memory_begin();
void memory_settle();  // judges the pending write, before another thread runs
void memory_end();
