// The checks of memory. A kernel to be checked is compiled with -fsanitize=thread and the like, but linked to the
// callbacks below instead of a sanitizer's: every load and store comes here, and is compared with earlier ones.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

namespace {
struct Access {
  uint32_t when;  // 0: none
  uint32_t group;
  uint16_t thread;
  bool atomic;
};

// The latest access to a cell, and the latest one by another thread of its simd-group, by another simd-group and by
// another threadgroup. That is enough: if any earlier access races with a new one, one of these four does.
struct History {
  Access last, lane, simdgroup, group;

  void add(const Access& access) {
    if (last.when && last.group != access.group) group = last;
    else if (last.when && last.thread / SIMD != access.thread / SIMD) simdgroup = last;
    else if (last.when && last.thread != access.thread) lane = last;
    last = access;
  }
};

struct Cell {
  History writes, reads;
};

struct Place {  // of an access: a buffer or a threadgroup variable, the first cell and how many
  const char* name;
  Cell* cells;
  long index;
  size_t count;
  bool threadgroup, initialised;
};

struct Caller {
  const msl::Site* site;
  uintptr_t pc;
};

struct Pending {  // a write that races with another unless both store the same value
  bool is;
  void* address;
  size_t bytes;
  char before[32];
  Place place;
  Access other;
  Caller caller;
};

Cell* buffer_cells[MAX_BUFFERS + 1];
Cell* threadgroup_cells;  // one for each byte
Pending pending;
uintptr_t told[256];
uint32_t num_told;

bool first_time(uintptr_t what) {
  for (uint32_t i = 0; i < num_told; i++)
    if (told[i] == what) return false;
  if (num_told < sizeof told / sizeof *told) told[num_told++] = what;
  return true;
}

void report_access(const char* what, const Place& place, Caller caller, const Access* other = nullptr) {
  if (!first_time(((uintptr_t)caller.site ^ caller.pc) * 31 + (uintptr_t)what)) return;
  char against[80] = "";
  if (other) snprintf(against, sizeof against, ", against thread %u of threadgroup %u", other->thread, other->group);
  report(caller.site, caller.pc, "%s: '%s'[%ld] by thread %u of threadgroup %u%s", what, place.name, place.index,
         current->thread.index, group, against);
}

bool ordered(const Access& earlier, bool threadgroup) {
  if (earlier.group != group) return false;
  if (earlier.thread == current->thread.index) return true;
  auto before = [&](const Fence& fence) { return earlier.when < (threadgroup ? fence.threadgroup : fence.device); };
  uint32_t simdgroup = current->thread.simdgroup;
  return before(group_fence) || (earlier.thread / SIMD == simdgroup && before(simd_fence[simdgroup]));
}

const Access* race(const History& history, const Place& place, bool atomic) {
  const Access* all[] = {&history.last, &history.lane, &history.simdgroup, &history.group};
  for (const Access* earlier : all) {
    bool there = earlier->when && !(place.threadgroup && earlier->group != group);
    if (there && !(atomic && earlier->atomic) && !ordered(*earlier, place.threadgroup)) return earlier;
  }
  return nullptr;
}

// Nearest variable to an offset in threadgroup memory, and whether the access lies in it.
const Placed* find_variable(size_t offset, size_t bytes, bool& inside) {
  const Placed* nearest = nullptr;
  for (const Placed* p = placed; p < placed + num_placed; p++) {
    inside = offset >= p->offset && offset + bytes <= p->offset + p->variable->bytes;
    if (inside) return p;
    if (!nearest || llabs((long)(offset - p->offset)) < llabs((long)(offset - nearest->offset))) nearest = p;
  }
  inside = false;
  return nearest;
}

Place find_place(uintptr_t offset, size_t bytes, bool write, Caller caller) {
  Place place = {"?", nullptr, 0, 0, offset < SLOT, true};
  long at = 0;
  size_t size = 1;
  bool inside = false;
  if (place.threadgroup) {
    if (const Placed* p = find_variable(offset, bytes, inside)) {
      place.name = p->variable->name, size = p->variable->grain, place.cells = threadgroup_cells + p->offset;
      at = (long)(offset - p->offset), place.initialised = false;
    }
  } else if (uint32_t i = offset / SLOT - 1; i < launch->num_buffers) {
    const Buffer& buffer = launch->buffers[i];
    size_t slack = (whole_pages(buffer.bytes) - buffer.bytes) / 16 * 16;
    at = (long)(offset % SLOT) - (long)BUFFER_START - (long)slack;
    inside = at >= 0 && at + bytes <= buffer.bytes;
    place.name = buffer.name, size = buffer.item, place.cells = buffer_cells[i];
    place.initialised = buffer.kind != OUTPUT;
  }
  place.index = at >= 0 ? at / (long)size : -(-at + (long)size - 1) / (long)size;
  if (!inside) {
    report_access(write ? "write out of bounds" : "read out of bounds", place, caller);
    stop();
  }
  if (!place.threadgroup && !place.cells && write) {
    report_access("write to an input", place, caller);
    stop();
  }
  if (place.cells) place.cells += place.index, place.count = (at % size + bytes + size - 1) / size;
  return place;
}

void watch(const volatile void* address, size_t bytes, bool write, bool atomic, Caller caller) {
  memory_settle();
  uintptr_t offset = (uintptr_t)address - (uintptr_t)arena;
  if (!current || !bytes) return;
  watched = caller.pc, watched_site = caller.site;
  if (offset >= SLOT * SLOTS) return;
  Place place = find_place(offset, bytes, write, caller);
  Access access = {now, group, (uint16_t)current->thread.index, atomic};
  for (; place.count; place.count--, place.cells++, place.index++) {
    Cell& cell = *place.cells;
    const Access* other = race(cell.writes, place, atomic);
    if (!write) {
      const Access& written = cell.writes.last;
      if (!place.initialised && (!written.when || (place.threadgroup && written.group != group)))
        report_access("read of uninitialised memory", place, caller);
      if (other) report_access("race, a read after a write", place, caller, other);
      cell.reads.add(access);
      continue;
    }
    if (other && (atomic || bytes > sizeof pending.before)) {
      report_access("race, a write after a write", place, caller, other);
    } else if (other && !pending.is) {
      pending = {true, (void*)address, bytes, {}, place, *other, caller};
      memcpy(pending.before, (void*)address, bytes);
    }
    if ((other = race(cell.reads, place, atomic))) report_access("race, a write after a read", place, caller, other);
    cell.writes.add(access);
  }
}
}  // namespace

void memory_settle() {
  if (!pending.is) return;
  pending.is = false;
  if (memcmp(pending.address, pending.before, pending.bytes))
    report_access("race, a write after a write", pending.place, pending.caller, &pending.other);
}

void memory_begin() {
  num_told = 0;
  pending.is = false;
  watched = 0, watched_site = nullptr;
  if (!launch->check) return;
  if (!threadgroup_cells) threadgroup_cells = (Cell*)calloc(4 * THREADGROUP_MEMORY, sizeof(Cell));
  for (uint32_t i = 0; i < launch->num_buffers; i++) {
    const Buffer& buffer = launch->buffers[i];
    buffer_cells[i] = buffer.kind == INPUT ? nullptr : (Cell*)calloc(buffer.bytes / buffer.item + 1, sizeof(Cell));
  }
}

void memory_end() {
  if (!launch->check) return;
  bool clean = !launch->text[0];
  for (uint32_t i = 0; i < launch->num_buffers; i++) {
    const Buffer& buffer = launch->buffers[i];
    size_t missing = 0, first = 0;
    for (size_t k = 0; buffer.kind == OUTPUT && k < buffer.bytes / buffer.item; k++)
      if (!buffer_cells[i][k].writes.last.when && !missing++) first = k;
    if (clean && missing)
      report(nullptr, 0, "output '%s': %zu of %zu elements never written, the first at %zu", buffer.name, missing,
             buffer.bytes / buffer.item, first);
    free(buffer_cells[i]);
    buffer_cells[i] = nullptr;
  }
  for (const Placed* p = placed; p < placed + num_placed; p++)
    memset(threadgroup_cells + p->offset, 0, p->variable->bytes * sizeof(Cell));
}

#define CALLER {nullptr, (uintptr_t)__builtin_return_address(0)}
extern "C" {
void msl_atomic(const volatile void* address, size_t bytes, bool write, const void* site) {
  if (launch->check) watch(address, bytes, write, true, {(const msl::Site*)site, 0});
}

#define ACCESSES(n)                                                                      \
  void __tsan_read##n(void* p) { watch(p, n, false, false, CALLER); }                    \
  void __tsan_write##n(void* p) { watch(p, n, true, false, CALLER); }                    \
  void __tsan_unaligned_read##n(void* p) { watch(p, n, false, false, CALLER); }          \
  void __tsan_unaligned_write##n(void* p) { watch(p, n, true, false, CALLER); }          \
  void __tsan_volatile_read##n(void* p) { watch(p, n, false, false, CALLER); }           \
  void __tsan_volatile_write##n(void* p) { watch(p, n, true, false, CALLER); }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void* p, size_t n) { watch(p, n, false, false, CALLER); }
void __tsan_write_range(void* p, size_t n) { watch(p, n, true, false, CALLER); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}

struct Description {  // how every check of -fsanitize=undefined begins
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(name, what)                                                                          \
  void __ubsan_handle_##name(Description* d) {                                                         \
    if (!current || !first_time((uintptr_t)d)) return;                                                 \
    msl::Site site = {d->file, "", d->line, d->column};                                                \
    report(&site, (uintptr_t)__builtin_return_address(0), what " by thread %u of threadgroup %u",      \
           current->thread.index, group);                                                              \
  }
UNDEFINED(type_mismatch_v1, "misaligned or null access")
UNDEFINED(out_of_bounds, "index outside a fixed-size array")
UNDEFINED(shift_out_of_bounds, "shift by more bits than the type has")
UNDEFINED(divrem_overflow, "integer division by zero or overflow")
}
