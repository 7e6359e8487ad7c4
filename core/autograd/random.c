// Fills tensors with random numbers. Element i of a tensor, in row-major order, is computed from
// word i % 4 of block i / 4; a normal number also uses the other word of its pair. Blocks count
// from the first block reserved for the tensor (rng.h). The numbers do not depend on strides or on
// the device. Called by Lua.
#include "base/error.h"
#include "base/numerics.h"
#include "base/rng.h"
#include "tensor/scratch.h"
#include "tensor/tensor.h"
#include "device/transfer.h"

#include <math.h>

// Returns the largest number below `high` in a float format. This number replaces results that
// would round up to `high`, which is excluded.
static double below(int dtype, double high)
{
  switch (dtype) {
    case ENG_f32: {
      float x = (float)high;
      return (double)x < high ? x : nextafterf(x, -INFINITY);
    }
    case ENG_f16:
    case ENG_bf16: {
      uint16_t x = dtype == ENG_f16 ? f16_from_f64(high) : bf16_from_f64(high);
      double value = dtype == ENG_f16 ? f16_to_f32(x) : bf16_to_f32(x);
      if (value >= high) {
        if ((x & 0x7FFF) == 0) x = 0x8001;
        else x = (uint16_t)(x & 0x8000 ? x + 1 : x - 1);
      }
      return dtype == ENG_f16 ? f16_to_f32(x) : bf16_to_f32(x);
    }
    default: return nextafter(high, -INFINITY);
  }
}

typedef struct distribution {
  bool   normal;
  double a, b;      // low and high, or mean and standard deviation
  double last;      // of a uniform distribution: the largest result
} distribution;

// Draws four numbers from one block.
static void draw(double value[4], const distribution *law, uint64_t counter)
{
  uint32_t word[4];
  philox_block(word, counter);
  if (law->normal) {
    for (int k = 0; k < 4; k += 2) {   // Box-Muller; the argument of log lies in (0, 1)
      double radius = sqrt(-2.0 * log((word[k] + 0.5) * 0x1p-32)) * law->b;
      double angle = 2.0 * M_PI * (word[k + 1] * 0x1p-32);
      value[k] = law->a + radius * cos(angle);
      value[k + 1] = law->a + radius * sin(angle);
    }
  } else {
    double width = law->b - law->a;
    for (int k = 0; k < 4; k++) {
      double u = (double)rng_unit(word[k]);
      double x = f64_is_finite(width) ? law->a + width * u : law->a * (1 - u) + law->b * u;
      value[k] = x > law->last ? law->last : x;
    }
  }
}

/// Writes numbers for the elements of x, in row-major order, to host memory.
static void fill_rows(void *to, const tensor *x, const distribution *law, uint64_t first)
{
  int64_t blocks = (x->count + 3) / 4;
  bool integer = !dtype_is_float(x->dtype);
#pragma omp parallel for schedule(static) if (x->count > 4096)
  for (int64_t block = 0; block < blocks; block++) {
    double value[4];
    draw(value, law, first + (uint64_t)block);
    for (int64_t i = 4 * block; i < 4 * block + 4 && i < x->count; i++) {
      double v = value[i - 4 * block];
      tensor_store(to, x->dtype, i, integer ? floor(v) : v);
    }
  }
}

/// Computes the numbers on the host, so that they are bit-identical on every device.
static eng_status fill(const tensor *x, const distribution *law)
{
  FAIL_IF(dtype_is_fp8(x->dtype), ENG_ERR_DTYPE, "random numbers: expected a tensor that is not "
          "in FP8, got %s; hint: fill an f32 tensor, then :to(\"%s\")", tensor_text(x),
          eng_dtype_name(x->dtype));
  uint64_t first = rng_take((x->count + 3) / 4);
  x->store->writes++;
  if (x->store->space == SPACE_HOST && tensor_contiguous(x)) {
    fill_rows(x->data, x, law, first);
    return ENG_OK;
  }
  SCRATCH_IN(SPACE_HOST, char, rows, x->count * eng_dtype_size(x->dtype));
  fill_rows(rows, x, law, first);
  return transfer_write(x, rows, x->dtype);
}

eng_status eng_uniform(const eng_tensor *handle, double low, double high)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(!(f64_is_finite(low) && f64_is_finite(high) && low <= high), ENG_ERR_VALUE,
          "uniform: expected finite bounds low <= high, got %g and %g", low, high);
  distribution law = {.a = low, .b = high, .last = high};
  if (low < high && dtype_is_float(x->dtype)) law.last = fmax(low, below(x->dtype, high));
  return fill(x, &law);
}

eng_status eng_normal(const eng_tensor *handle, double mean, double std)
{
  tensor *x;
  ENG_TRY(tensor_get(&x, handle));
  FAIL_IF(!(f64_is_finite(mean) && f64_is_finite(std) && std >= 0), ENG_ERR_VALUE, "normal: "
          "expected a finite mean and a standard deviation >= 0, got %g and %g", mean, std);
  return fill(x, &(distribution){.normal = true, .a = mean, .b = std});
}
