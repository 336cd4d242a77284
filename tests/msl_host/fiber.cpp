#include "fiber.h"

#include <string.h>

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
void switch_context(Context& from, Context& to) { msl_switch(&from.stack_pointer, to.stack_pointer); }
void start_context(Context& context, char* stack, void (*function)()) {
  void** top = (void**)(stack + STACK) - 1;  // aligned as after a call
  *top = nullptr;
  *--top = (void*)function;
  context.stack_pointer = top - 6;
  memset(context.stack_pointer, 0, 6 * sizeof(void*));
}
#else  // any other machine: about 15 times slower
void switch_context(Context& from, Context& to) { swapcontext(&from.portable, &to.portable); }
void start_context(Context& context, char* stack, void (*function)()) {
  getcontext(&context.portable);
  context.portable.uc_stack.ss_sp = stack;
  context.portable.uc_stack.ss_size = STACK;
  context.portable.uc_link = nullptr;
  makecontext(&context.portable, function, 0);
}
#endif
