// Fibers: a Metal thread is a stack and a saved stack pointer; switching saves the registers that a call preserves.
#pragma once
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

constexpr size_t STACK = 64 << 10;  // private memory of a Metal thread
constexpr size_t PAGE = 4096;       // of which the one below each stack cannot be touched

struct Context {
  void* stack_pointer;
  ucontext_t portable;
};

#if defined(__x86_64__) && !defined(MSL_PORTABLE)
extern "C" void msl_switch(void** from, void* to);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch, @function
msl_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size msl_switch, . - msl_switch
)");
inline void switch_context(Context& from, Context& to) { msl_switch(&from.stack_pointer, to.stack_pointer); }
inline void start_context(Context& context, char* stack, void (*function)()) {
  void** top = (void**)(stack + STACK) - 2;  // aligned as after a call
  *top = nullptr;
  *--top = (void*)function;
  context.stack_pointer = top - 6;
  memset(context.stack_pointer, 0, 6 * sizeof(void*));
}
#else  // any other machine: about 15 times slower
inline void switch_context(Context& from, Context& to) { swapcontext(&from.portable, &to.portable); }
inline void start_context(Context& context, char* stack, void (*function)()) {
  getcontext(&context.portable);
  context.portable.uc_stack.ss_sp = stack;
  context.portable.uc_stack.ss_size = STACK;
  context.portable.uc_link = nullptr;
  makecontext(&context.portable, function, 0);
}
#endif
