// Fibers: a Metal thread is a stack and a saved stack pointer; switching saves the registers that a call preserves.
#pragma once
#include <stdint.h>
#include <ucontext.h>

constexpr size_t STACK = 64 << 10;  // private memory of a Metal thread
constexpr size_t PAGE = 4096;       // of which the one below each stack cannot be touched

struct Context {
  void* stack_pointer;
  ucontext_t portable;
};

void switch_context(Context& from, Context& to);
void start_context(Context& context, char* stack, void (*function)());
