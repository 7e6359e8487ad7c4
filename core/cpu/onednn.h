// What the users of oneDNN 2.6 to 3.x share: its two APIs under one set of names, and the table of
// built primitives. Included by gemm_onednn.c and conv_onednn.c.
#pragma once

#include <oneapi/dnnl/dnnl.h>

#include "base/error.h"
#include "device/backend.h"

// The functions that differ between oneDNN 2 and 3. Version 2 keeps a memory descriptor in the
// caller's struct and describes an operation before it makes the primitive descriptor. Version 3
// allocates memory descriptors and needs one call for an operation.
#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t layout_view;
static inline layout_view view(const dnnl_memory_desc_t *l) { return *l; }
static inline void layout_destroy(dnnl_memory_desc_t *l)
{
  if (*l) dnnl_memory_desc_destroy(*l);
}
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
  int64_t          bytes[ONEDNN_MEMORIES];   // of memory that the owner allocates for a call
} onednn_entry;

extern dnnl_engine_t onednn_engine;
extern dnnl_stream_t onednn_stream;

eng_status onednn_failed(const char *what, dnnl_status_t status);
/// Creates the engine and the stream, once.
eng_status onednn_open(void);

/// The entry of a key of `bytes` bytes, a multiple of 8 and at most ONEDNN_KEY. Keys are compared
/// as bytes, so the caller zeroes a key before it fills it. A new entry is not `taken`; onednn_take
/// makes it so.
onednn_entry *onednn_find(const void *key, size_t bytes);
void          onednn_take(onednn_entry *e, const void *key, size_t bytes);

/// A format's number in oneDNN; dnnl_data_type_undef for formats other than f32, f16 and bf16.
int onednn_format(int dtype);

/// Attributes with which the caller provides the workspace.
dnnl_status_t onednn_attributes(dnnl_primitive_attr_t *out);
