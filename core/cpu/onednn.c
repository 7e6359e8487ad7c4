// oneDNN's engine and stream, and the table of built primitives. A primitive is built once for each
// combination of shape, strides, formats and thread count, and kept in the table, so training with
// fixed shapes builds no primitive after its first step. Owns the table. See onednn.h. Called by
// gemm_onednn.c and conv_onednn.c.
#include "onednn.h"

#include <string.h>

enum { TABLE_SIZE = 1024 };   // entries, a power of two; emptied when three quarters are in use

dnnl_engine_t onednn_engine;
dnnl_stream_t onednn_stream;

static onednn_entry table[TABLE_SIZE];
static int          entries;

eng_status onednn_failed(const char *what, dnnl_status_t status)
{
  return error_set(ENG_ERR_LIBRARY, "oneDNN: %s failed with dnnl_status_t %d (1: out of memory, 2: "
                   "invalid arguments, 3: not implemented, 5: runtime error)", what, (int)status);
}

eng_status onednn_open(void)
{
  if (onednn_stream) return ENG_OK;
  if (!onednn_engine)
    DNNL_TRY("creating the CPU engine", dnnl_engine_create(&onednn_engine, dnnl_cpu, 0));
  DNNL_TRY("creating the stream",
           dnnl_stream_create(&onednn_stream, onednn_engine, dnnl_stream_default_flags));
  return ENG_OK;
}

int onednn_format(int dtype)
{
  return dtype == ENG_f32 ? dnnl_f32 : dtype == ENG_bf16 ? dnnl_bf16
       : dtype == ENG_f16 ? dnnl_f16 : dnnl_data_type_undef;
}

dnnl_status_t onednn_attributes(dnnl_primitive_attr_t *out)
{
  dnnl_status_t status = dnnl_primitive_attr_create(out);
  if (status != dnnl_success) return status;
  status = dnnl_primitive_attr_set_scratchpad_mode(*out, dnnl_scratchpad_mode_user);
  if (status != dnnl_success) dnnl_primitive_attr_destroy(*out);
  return status;
}

static uint64_t hash_of(const void *key, size_t bytes)
{
  const uint64_t *word = key;
  uint64_t h = 14695981039346656037u;
  for (size_t i = 0; i < bytes / sizeof *word; i++) {
    h = (h ^ word[i]) * 1099511628211u;
    h ^= h >> 29;
  }
  return h;
}

static void release(onednn_entry *e)
{
  for (int i = 0; i < ONEDNN_PRIMITIVES; i++)
    if (e->primitive[i]) dnnl_primitive_destroy(e->primitive[i]);
  for (int i = 0; i < ONEDNN_MEMORIES; i++)
    if (e->memory[i]) dnnl_memory_destroy(e->memory[i]);
  memset(e, 0, sizeof *e);
}

static bool has_key(const onednn_entry *e, const void *key, size_t bytes)
{
  static const unsigned char zeros[ONEDNN_KEY];
  return memcmp(e->key, key, bytes) == 0 &&
         memcmp(e->key + bytes, zeros, ONEDNN_KEY - bytes) == 0;
}

onednn_entry *onednn_find(const void *key, size_t bytes)
{
  if (entries >= TABLE_SIZE / 4 * 3) {
    for (int i = 0; i < TABLE_SIZE; i++) release(&table[i]);
    entries = 0;
  }
  uint64_t at = hash_of(key, bytes) % TABLE_SIZE;
  while (table[at].taken && !has_key(&table[at], key, bytes)) at = (at + 1) % TABLE_SIZE;
  return &table[at];
}

void onednn_take(onednn_entry *e, const void *key, size_t bytes)
{
  e->taken = true;
  memcpy(e->key, key, bytes);
  entries++;
}
