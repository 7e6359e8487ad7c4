// What gemm_onednn.c and conv_onednn.c share. Included by both and by onednn.c. Both use oneDNN 2.6
// to 3.x. This file gives one set of names to the APIs of oneDNN 2 and 3, and declares the table of
// built primitives.
#pragma once

#include <oneapi/dnnl/dnnl.h>

#include "base/error.h"
#include "device/backend.h"
#include "tensor/scratch.h"

// The functions that differ between oneDNN 2 and 3. In version 2, a memory descriptor is a struct
// of the caller, and a primitive descriptor is made from an operation descriptor. In version 3,
// oneDNN allocates memory descriptors, and one call makes a primitive descriptor.
#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t layout_view;
static inline layout_view view(const dnnl_memory_desc_t *l) { return *l; }
static inline void layout_destroy(dnnl_memory_desc_t *l) { if (*l) dnnl_memory_desc_destroy(*l); }
#define layout_create dnnl_memory_desc_create_with_strides
#define layout_create_any dnnl_memory_desc_create_with_tag
#else
typedef const dnnl_memory_desc_t *layout_view;
static inline layout_view view(const dnnl_memory_desc_t *l) { return l; }
static inline void layout_destroy(dnnl_memory_desc_t *l)    { (void)l; }
#define layout_create dnnl_memory_desc_init_by_strides
#define layout_create_any dnnl_memory_desc_init_by_tag
#endif

#define DNNL_TRY(what, call) \
  do { \
    dnnl_status_t s_ = (call); \
    if (s_ != dnnl_success) return onednn_failed(what, s_); \
  } while (0)

enum { ONEDNN_KEY = 256, ONEDNN_PRIMITIVES = 4, ONEDNN_MEMORIES = 8 };

/// The primitives and memories built for one key. The owner of the key (gemm_onednn.c or
/// conv_onednn.c) assigns their indices.
typedef struct onednn_entry {
  bool             taken;
  bool             refused;       // oneDNN does not support this key
  unsigned char    key[ONEDNN_KEY];
  dnnl_primitive_t primitive[ONEDNN_PRIMITIVES];
  dnnl_memory_t    memory[ONEDNN_MEMORIES];
  // Sizes of the memories that each call allocates in scratch memory; 0 for the other memories.
  int64_t          bytes[ONEDNN_MEMORIES];
} onednn_entry;

extern dnnl_engine_t onednn_engine;
extern dnnl_stream_t onednn_stream;

/// Sets the error LIBRARY, which says that oneDNN failed at step `what`.
eng_status onednn_failed(const char *what, dnnl_status_t status);
/// Creates the engine and the stream, once.
eng_status onednn_open(void);

/// Returns the entry of a key. `bytes` is the size of the key, a multiple of 8 and at most
/// ONEDNN_KEY. Keys are compared as bytes, so the caller zeroes a key before it fills it. A new
/// entry is not `taken` until onednn_take marks it.
onednn_entry *onednn_find(const void *key, size_t bytes);
void          onednn_take(onednn_entry *e, const void *key, size_t bytes);

/// Returns oneDNN's constant for a dtype, or dnnl_data_type_undef for a dtype other than f32, f16
/// and bf16.
int onednn_format(int dtype);

/// Creates attributes that make the caller provide the scratchpad.
dnnl_status_t onednn_attributes(dnnl_primitive_attr_t *out);
