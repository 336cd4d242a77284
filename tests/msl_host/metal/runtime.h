// What a compiled kernel and the runtime know of each other.
#pragma once
#include <stddef.h>
#include <stdint.h>

// g++ lays out __builtin_source_location() as this struct; <source_location> itself needs C++20.
namespace std {
struct source_location {
  struct __impl {
    const char* _M_file_name;
    const char* _M_function_name;
    unsigned _M_line;
    unsigned _M_column;
  };
};
}  // namespace std

namespace msl {
using Site = std::source_location::__impl;

struct Size {
  uint32_t x, y, z;
};

// What Metal tells a thread about itself. Sizes of an edge threadgroup are its own, `nominal` is what was asked for.
struct Thread {
  Size in_grid, in_group, group, group_size, grid_size, groups, nominal;
  uint32_t index, lane, simdgroup, simdgroups;
};

// A `threadgroup` variable. The checks watch it in cells of `grain` bytes.
struct Variable {
  const char* name;
  size_t bytes, align, grain;
};

// Computes a simd-group operation for all lanes of the mask at once, from and to their operands.
using Collective = void (*)(void* const* operands, const uint32_t* arguments, uint32_t lanes);

extern "C" {
void msl_barrier(bool threadgroup, unsigned flags, const void* site);
void msl_collective(Collective compute, void* operand, uint32_t argument, const void* site);
void msl_atomic(const volatile void* address, size_t bytes, bool write, const void* site);
void* msl_threadgroup(const Variable* variable);
const Thread* msl_thread();
void msl_fail(const char* what);
}
}  // namespace msl

#define MSL_INLINE inline __attribute__((always_inline, artificial))
#define MSL_UNWATCHED __attribute__((no_sanitize_thread, no_sanitize_undefined))
#define MSL_SITE const void *site = __builtin_source_location()
