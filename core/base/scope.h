// Variables that release what they own when their block ends. Used by most folders.
#pragma once

#include <stdlib.h>
#include <string.h>

/// Before a declaration: calls close(&variable) when the variable's block ends, also by `return`.
#define AT_END(close) __attribute__((cleanup(close)))

/// Before a declaration of pointers that come from malloc or are NULL: frees the memory when the
/// block ends. The pointers must be initialized.
#define FREED AT_END(scope_free)
static inline void scope_free(void *pointer)
{
  void *memory;
  memcpy(&memory, pointer, sizeof memory);   // `pointer` points to a pointer of any type
  free(memory);
}
