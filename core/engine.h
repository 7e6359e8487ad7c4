// engine.h: the public interface of the core, and the only header that Lua uses. The build runs it
// through the preprocessor (with ENG_CDEF defined) and passes the result to LuaJIT's ffi.cdef, so
// every declaration becomes a Lua binding. The `///` comment above a declaration states its
// contract: shapes (written [rows x columns]), dtypes, units and errors.
//
// A function that can fail returns ENG_OK or an error code, and eng_error_message() returns the
// error's text. Functions store results through pointers, which are usually their first parameters.
// Only one thread may call the core; kernels use OpenMP inside. Included by every folder of core/.
#ifndef ENGINE_H
#define ENGINE_H

#ifndef ENG_CDEF
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)
#define ENG_VERSION "0.2.0"
#endif

// ------------------------------------------------------------------ status

/// The status of a call: ENG_OK, or an error such as ENG_ERR_SHAPE. errors.def lists the errors.
typedef enum eng_status {
#define ENG_ERROR(code, number, meaning) ENG_ERR_##code = number,
#include "errors.def"
#undef ENG_ERROR
  ENG_OK = 0
} eng_status;

/// Returns the text of this thread's last error. It is never NULL, and is valid until the next
/// error.
const char *eng_error_message(void);

/// eng_version returns the version of this library as "major.minor.patch". eng_abi_size returns the
/// size of eng_op_call in bytes; the Lua code compares it with the size of its own declaration.
const char *eng_version(void);
int eng_abi_size(void);

// ------------------------------------------------------------------ number formats

/// The number formats of tensors: ENG_f32 and the other formats that dtypes.def lists.
typedef enum eng_dtype {
#define ENG_DTYPE(name, number, bytes, kind) ENG_##name = number,
#include "dtypes.def"
#undef ENG_DTYPE
  ENG_DTYPE_COUNT
} eng_dtype;

/// Returns the name of a dtype, such as "f16", or "?" for an unknown number.
const char *eng_dtype_name(int dtype);
/// Returns the bytes per element of a dtype, or 0 for an unknown number.
int eng_dtype_size(int dtype);

/// What a number format can represent. The last four fields are magnitudes.
typedef struct eng_format {
  int32_t exponent_bits, fraction_bits, bias;
  int32_t max_exponent;       // floor(log2) of the largest finite number
  int32_t min_exponent;       // floor(log2) of the smallest normal number
  int32_t is_signed;          // 0: no sign bit (ue8m0, ue4m3)
  double largest;             // largest finite number: 65504 for f16
  double overflow;            // smallest double that rounds to inf (e4m3, ue4m3: to nan): 65520 for
                              // f16; inf if no finite double does (such as f64, ue8m0, e2m1, int8)
  double normal;              // smallest normal number
  double smallest;            // smallest number above zero
} eng_format;
/// Describes a format by name: "f64", "f32", "tf32", "bf16", "f16", "e5m6", "e5m2", "e4m3",
/// "e4m3_ieee", "e3m2", "e2m3", "e2m1", "ue4m3", "ue8m0", or the fixed-point "int8" and "mxint8"
/// (no exponent bits). Returns false and leaves *out unchanged if the format is unknown.
bool eng_format_get(eng_format *out, const char *name);

// ------------------------------------------------------------------ tensors

/// The largest number of dimensions.
enum { ENG_MAX_DIMS = 6 };

/// The handle by which scripts hold a tensor: a slot in the engine's table and the slot's
/// generation. Using a handle after its tensor was dropped returns ENG_ERR_STALE and never crashes.
typedef struct eng_tensor { uint32_t slot, generation; } eng_tensor;

/// The description of a tensor that eng_info returns. Strides are in elements.
typedef struct eng_tensor_info {
  int64_t shape[6], stride[6];
  int64_t count;              // number of elements
  int32_t ndim, dtype;
  int32_t requires_grad;      // 1: backward() computes its gradient
  int32_t is_leaf;            // 1: no operation that is on the tape made it
  int32_t owner;              // 0: the current step, 1: kept until freed, 2: a parameter set
  int32_t contiguous;         // 1: row-major without gaps
  int64_t step;               // the step in which the tensor was made
  int32_t space;              // memory space: 0: host, 1: CUDA card
  int32_t divided;            // 1: a weight divided among ranks; only operations can read it
  void   *data;               // first element; NULL if divided or not in host memory
} eng_tensor_info;

/// The lifetime of a new tensor. KEEP: until eng_free. STEP: until the step ends, as for the
/// results of operations. AUTO: like STEP inside a step or scope (see eng_step_begin), like KEEP
/// elsewhere.
enum { ENG_AUTO = 0, ENG_KEEP = 1, ENG_STEP = 2 };

/// Makes a tensor of `ndim` dimensions (0: a scalar), filled with zeros. `home` is its lifetime,
/// for example ENG_KEEP. Errors: VALUE (a negative size, too many dimensions, or a product of the
/// sizes above 0 that exceeds 2^48), DTYPE, MEMORY.
eng_status eng_new(eng_tensor *out, int dtype, int ndim, const int64_t *shape, int home);

/// Copies `x` into a tensor that lives until eng_free, beyond the step of `x`. The copy is not
/// recorded on the tape.
eng_status eng_keep(eng_tensor *out, const eng_tensor *x);

/// Frees a kept tensor. A tensor of the step is freed at once if the tape is empty; otherwise it
/// lives until the end of the step as usual. Errors: STATE (`x` belongs to a parameter set, or `x`
/// is kept and the tape has operations).
eng_status eng_free(const eng_tensor *x);

/// Describes a tensor.
eng_status eng_info(eng_tensor_info *out, const eng_tensor *x);

/// Converts `count` elements in host memory from format `from` to the dtype of `x` and stores them
/// in `x`. Conversions to floating point round to nearest even. Conversions to integers round
/// toward zero and saturate, and NaN becomes 0. Errors: SHAPE (`x` does not have `count` elements),
/// DTYPE, VALUE (`source` is NULL).
eng_status eng_write(const eng_tensor *x, const void *source, int from, int64_t count);

/// Copies all elements in row-major order into host memory in format `to`, with the conversions of
/// eng_write. With `to` = f64, a negative quiet NaN that has a payload becomes the default NaN,
/// because LuaJIT would take the payload for a type tag.
eng_status eng_read(void *target, int to, int64_t count, const eng_tensor *x);

/// Computes a 64-bit checksum of the bits of a contiguous tensor in any memory: the XXH64 hash of
/// the XXH64 hashes of its 64 KiB pieces. It depends neither on the device nor on the number of
/// threads. Waits for the device. Errors: SHAPE (not contiguous).
eng_status eng_checksum(uint64_t *out, const eng_tensor *x);
/// Returns the XXH64 hash, with seed 0, of `size` bytes of host memory.
uint64_t eng_hash64(const void *data, int64_t size);

/// Reads the value of a tensor with one element as a double, with eng_read's treatment of NaN.
/// Errors: SHAPE.
eng_status eng_item(double *out, const eng_tensor *x);

/// Sets every element to `value`.
eng_status eng_fill(const eng_tensor *x, double value);

/// eng_uniform fills `x` with uniform numbers in [low, high) (`low` if both are equal), eng_normal
/// with normal numbers of the given `mean` and `std`. Integer dtypes get the numbers rounded down.
/// The numbers come from the engine's counter-based generator (Philox 4x32-10) and are the same on
/// every device. Errors: VALUE (not finite, low > high, std < 0), DTYPE (FP8).
eng_status eng_uniform(const eng_tensor *x, double low, double high);
eng_status eng_normal(const eng_tensor *x, double mean, double std);

/// Copies `x`, row-major, into the memory of device `name`, even if `x` is in that memory already.
/// The copy has the lifetime ENG_AUTO and is not recorded on the tape. Errors: DEVICE.
eng_status eng_to_device(eng_tensor *out, const eng_tensor *x, const char *name);

/// Copies `source` into `target` elementwise, with conversion and broadcasting. The copy is not
/// recorded on the tape.
eng_status eng_copy(const eng_tensor *target, const eng_tensor *source);

// ------------------------------------------------------------------ steps and memory

/// Opens a step: tensors made from now on, except kept ones, live until eng_step_end. Errors: STATE
/// (a step is open; steps do not nest).
eng_status eng_step_begin(void);

/// Ends the step: every tensor of the step becomes stale, the tape is emptied, and the next step
/// reuses the memory. Without an open step it does the same for everything computed so far.
eng_status eng_step_end(void);

/// Returns the number of the current step, counted from 0.
int64_t eng_step_count(void);

/// Open and close a scope, for instance around evaluation or sampling. eng_scope_begin stores the
/// scope's start in `mark`; eng_scope_end drops the tensors created since then, except kept ones.
/// The tape must not refer to a dropped tensor. Scopes nest; every begin needs an end, even after
/// an error. Errors: GRADIENT (the tape refers to a dropped tensor), STATE (the scope has ended).
eng_status eng_scope_begin(int64_t *mark);
eng_status eng_scope_end(int64_t mark);

/// Bytes of memory for one purpose: `reserved` bytes are taken from the system, `used` bytes are in
/// use now, `peak` is the largest `used` so far. `allocations` counts requests to the system.
typedef struct eng_memory_row {
  const char *name;
  int64_t used, peak, reserved, allocations;
} eng_memory_row;
/// Fills up to `capacity` rows and returns their number. After the first step, `allocations` should
/// not grow.
int eng_memory(eng_memory_row *rows, int capacity);
/// Limits the total size of all arenas of each memory space (host, card) to `bytes`; 0: no limit.
/// Allocations beyond the limit fail with MEMORY.
void eng_memory_limit(int64_t bytes);

// ------------------------------------------------------------------ operations

/// The operations: ENG_OP_matmul and the other operations that ops.def lists.
typedef enum eng_op {
#define ENG_OP(name, ...) ENG_OP_##name,
#include "ops.def"
  ENG_OP_COUNT
} eng_op;

/// The largest numbers of inputs, outputs and attributes of an operation.
enum { ENG_OP_INPUTS = 16, ENG_OP_OUTPUTS = 8, ENG_OP_INTS = 14, ENG_OP_FLOATS = 4 };

// The attributes of one operation by name, such as call.sum.mask. They share memory with the `ints`
// and `floats` of the call.
#define ENG_LIST(...) __VA_ARGS__
#define ENG_OP_ATTRIBUTES(name, int_names, float_names) \
  struct { \
    union { struct { int64_t ENG_LIST int_names; }; int64_t all[14]; }; \
    double ENG_LIST float_names; \
  } name;

/// One call of an operation. ops.def describes inputs, outputs and attributes of each operation. An
/// absent optional input is {0, 0}. Attributes have names, as in call.sum.mask. `ints` and `floats`
/// give access to the same attributes by position.
typedef struct eng_op_call {
  int32_t op, n_in, n_out, reserved;
  eng_tensor in[16], out[8];
  union {
    struct { int64_t ints[14]; double floats[4]; };
#define ENG_OP(name, inputs, outputs, layout, cast, shape, gradient, reads, saves, ints, floats) \
    ENG_OP_ATTRIBUTES(name, ints, floats)
#include "ops.def"
  };
} eng_op_call;

/// Runs an operation: checks shapes and dtypes, applies the current precision, computes, and
/// records it on the tape if a gradient may be needed. Outputs are returned in call->out.
eng_status eng_run(eng_op_call *call);

/// Runs an operation that has ENG_ADDS for output 0 in ops.def, such as matmul. Output 0 is written
/// into the caller's tensor `target`, or added to it if the call's attribute `add` is not 0. The
/// call is not recorded. `target` has the output's shape and any floating-point dtype, is
/// contiguous, and shares no memory with an input.
eng_status eng_run_into(eng_op_call *call, const eng_tensor *target);

/// A row of ops.def. Bit k of a mask stands for input or output k.
typedef struct eng_op_info {
  const char *name, *layout, *cast, *shape;
  const char *gradient;               // "none": the operation has no gradient
  const char *ints, *floats;          // "(mask, keep)"; if none, "(no_ints)", "(no_floats)"
  int32_t n_in, n_out;                // -1: any number
  // Masks. optional: the inputs that may be absent. reads: the inputs whose values the gradient
  // rule reads. saves: the outputs whose values the gradient rule reads.
  int32_t optional, reads, saves;
  int32_t unary;                      // 1: one elementwise input, no attributes
} eng_op_info;
/// Returns the row of operation `op`, or NULL past the end.
const eng_op_info *eng_op_describe(int op);
/// Returns the name of operation `op`, such as "matmul", or NULL past the end.
const char *eng_op_name(int op);
/// Returns whether a device ("cpu", "reference" or "cuda") can run an operation: it has a kernel
/// for the operation, or the operation needs none. False if there is no such device.
bool eng_op_supported(const char *device, int op);

// ------------------------------------------------------------------ FP8

#include "engine_fp8.h"

// ------------------------------------------------------------------ autograd

/// Declares that the caller does not use a tensor of the step again. Its memory is freed at once
/// unless another tensor over this memory is still in use, a gradient rule on the tape reads it, a
/// checkpoint is open, or `x` is a leaf that requires a gradient. Do not use `x` afterwards: once
/// its memory is freed, this is an error (STALE).
eng_status eng_done(const eng_tensor *x);

/// Sets whether backward() computes the gradient of the leaf `x`. Errors: GRADIENT (not a leaf),
/// DTYPE (not floating-point).
eng_status eng_requires_grad(const eng_tensor *x, bool on);

/// Turns recording on or off; returns the previous setting.
bool eng_grad_enabled(bool on);

/// Begin and end an activation checkpoint. Of the tensors that recorded operations compute between
/// these calls, only `results` [n], tensors of up to 256 bytes and the results of operations with a
/// gradient written in Lua keep their memory. The backward pass recomputes the others bit for bit
/// before it needs them. eng_checkpoint_begin returns false if recording is off or a checkpoint is
/// open already; then do not call eng_checkpoint_end. After an error, pass n = -1; then nothing is
/// freed.
bool       eng_checkpoint_begin(void);
eng_status eng_checkpoint_end(const eng_tensor *results, int n);

/// Runs the backward pass from a loss of one element. `seed` (the loss scale) is the gradient of
/// the loss. The pass adds to the gradients of leaves, and then empties the tape unless `retain` is
/// true. The call returns early at each Lua node on the tape: see eng_backward_resume. Errors:
/// GRADIENT (nothing requires a gradient, the tape was emptied, or a tensor that a rule reads was
/// modified), SHAPE (not one element), STATE (a pass is running), and those of operations.
eng_status eng_backward(const eng_tensor *loss, double seed, bool retain);

/// Sets the relative scale (1 by default) of the operations recorded from now on: a factor on their
/// gradients in addition to the seed. Layers that have a loss scale of their own use this. `before`
/// receives the previous relative scale. A gradient that passes between operations with different
/// relative scales is multiplied by the ratio of the two. The final gradient of a parameter has the
/// relative scale set by eng_params_relative_scale; the gradients of all other leaves have relative
/// scale 1. Errors: VALUE.
eng_status eng_gradient_relative_scale(double *before, double relative);

/// The protocol for gradients written in Lua. After eng_backward or eng_backward_resume,
/// eng_backward_pending returns the id of the pending Lua node (-1: backward has finished). Lua
/// reads the output gradients with eng_backward_output, passes the gradient of each input to
/// eng_backward_input, and calls eng_backward_resume. Outputs and inputs count from 0.
int64_t    eng_backward_pending(void);
eng_status eng_backward_output(eng_tensor *gradient, int output);
eng_status eng_backward_input(int input, const eng_tensor *gradient);
eng_status eng_backward_resume(void);
/// Aborts a backward pass that waits for Lua (which raised an error) and empties the tape.
void       eng_backward_abort(void);
/// Records a Lua node on the tape, if recording is on and an input requires a gradient: outputs y
/// [n_out], computed from inputs x [n_in]. `id` (>= 0) is Lua's number for the gradient function.
/// Errors: VALUE (too few or too many tensors), GRADIENT (y is not a new tensor of this step).
eng_status eng_record_lua(int64_t id, const eng_tensor *x, int n_in, const eng_tensor *y,
                          int n_out);

/// Returns the gradient of a leaf after backward() as a tensor of the step. For a member of a
/// parameter set, this tensor is a view of the set's buffer. *out has slot 0 if the leaf has no
/// gradient. Errors: STATE (the gradient is divided among ranks).
eng_status eng_gradient(eng_tensor *out, const eng_tensor *x);
/// Drops the gradient of one leaf.
eng_status eng_clear_gradient(const eng_tensor *x);
/// Returns the number of operations on the tape.
int eng_tape_length(void);

// ------------------------------------------------------------------ precision

/// How autocast changes operations, by their class (column `cast` of ops.def). A field of -1
/// changes nothing.
typedef struct eng_precision {
  int32_t compute;      // dtype that class LOWER runs in: matmul, linear, attention
  int32_t residual;     // dtype of an embedding's output, hence of the residual stream
  int32_t norm;         // output dtype of class NORM (statistics are always f32)
  int32_t wide;         // output dtype of class WIDE: softmax, exp, losses, sums
  int32_t fp8;          // 1: operations of FP8 layers run in FP8 as the recipe of their site says
} eng_precision;

/// Sets the current precision; NULL turns autocast off. `previous` may be NULL.
void eng_autocast(const eng_precision *now, eng_precision *previous);

// ------------------------------------------------------------------ statistics, policies

#include "engine_policy.h"

// ------------------------------------------------------------------ parameter sets and optimizers

/// The parameters of a model: one flat buffer each for master weights (f32 or bf16), gradients and,
/// if the precision requires it, low-precision weights. Parameters keep the order of
/// eng_params_new. Statistics, unscaling and updates fail with DEVICE unless the current device
/// uses the set's memory.
typedef struct eng_params eng_params;

/// Takes over `n` leaves in f32 or bf16 and moves their values into the flat buffer. Their handles
/// stay valid. `names` are used in messages and records. Errors: DTYPE, VALUE (a tensor is listed
/// twice, is in another set or is not a leaf), DEVICE (tensors of different devices).
eng_status eng_params_new(eng_params **out, const eng_tensor *tensors, const char *const *names,
                          int n);
/// Frees a set and its tensors. NULL is allowed.
void eng_params_free(eng_params *set);

/// Converts the master weights of each parameter i to dtype[i], f32 or bf16, rounding to nearest.
/// Tensor handles stay valid. If a dtype changes, all gradients and low-precision weights are
/// dropped, so call eng_params_precision afterwards. bf16 masters have no low-precision weights.
/// Errors: DTYPE; STATE (the tape has operations, a view of the weights exists, zero=3).
eng_status eng_params_masters(eng_params *set, const int32_t *dtype);
/// For each parameter i, sets the dtype low[i] of its low-precision weights for the forward pass
/// (ENG_f32: none, the master weights are used) and the dtype gradient[i] of its gradient. If `low`
/// or `gradient` is NULL, the dtype is ENG_f32 for every parameter. Clears the gradients. Errors:
/// DTYPE; STATE (a format cannot change now, for example because the tape has operations).
eng_status eng_params_precision(eng_params *set, const int32_t *low, const int32_t *gradient);
/// Sets whether gradients add up over several backward passes; off at first. If on, the sums of f16
/// and bf16 gradients are kept in f32: each term is still rounded to f16 or bf16, where it can
/// overflow, and then added in f32. A change clears the gradients. Errors: STATE (a format would
/// change and the gradients are divided among ranks, or a reference backward pass is running).
eng_status eng_params_accumulate(eng_params *set, bool on);
/// Rounds the master weights into the low-precision weights again. Needed only after writing
/// through eng_tensor_info.data; the next operation notices writes by eng_write, eng_fill,
/// eng_copy, eng_uniform and eng_normal.
eng_status eng_params_refresh(eng_params *set);
/// Returns the low-precision weights of parameter `index` as a tensor over the set's memory. If a
/// script has written to the master weights, the function rounds them again first. *out has slot 0
/// if the parameter has no low-precision weights.
eng_status eng_params_low(eng_tensor *out, eng_params *set, int index);
/// Drops all gradients without writing memory.
eng_status eng_params_zero_grad(eng_params *set);
/// Computes statistics of the gradients in one read-only pass. `scale` is the loss scale that the
/// gradients contain; the record's amax and norm are divided by it. `stats` is NULL or has an entry
/// for each parameter. Fills the gradient fields of `record`; the caller fills step, loss and the
/// other fields.
eng_status eng_params_stats(eng_record *record, eng_tensor_stats *stats, eng_params *set,
                            double scale, unsigned needs);
/// Compute eng_params_stats in two calls, so that the caller can do other work in between. `start`
/// requests the statistics and the values of `losses` (n_losses <= ENG_STATS_LOSSES tensors of one
/// f32 element). `fetch` waits for the oldest request and returns its results; `loss` is the sum of
/// the losses. Up to ENG_STATS_PENDING requests may be pending. An update with eng_update.lagged
/// uses the newest request. `known`: the statistics of all parameters, with at least ENG_NEED_NORM,
/// if the ranks have already computed them together; else NULL. Devices that compute statistics
/// asynchronously (CUDA) do not accept `known`. Errors: STATE (nothing to fetch, too many pending),
/// VALUE (too many losses), DTYPE, DEVICE.
enum { ENG_STATS_PENDING = 4, ENG_STATS_LOSSES = 64 };
eng_status eng_params_stats_start(eng_params *set, unsigned needs, const eng_tensor *losses,
                                  int n_losses, const eng_tensor_stats *known);
eng_status eng_params_stats_fetch(eng_record *record, eng_tensor_stats *stats, double *loss,
                                  eng_params *set, double scale);
/// `forget` drops all pending requests, if there are any. `withdraw` drops the newest request,
/// after its step failed. Errors: STATE (none is pending).
void eng_params_stats_forget(eng_params *set);
eng_status eng_params_stats_withdraw(eng_params *set);
/// Multiplies every gradient by `factor`. f32 gradients are scaled in place. For other formats the
/// results go to an f32 buffer, so that unscaling loses no bits; this buffer holds the set's
/// gradients until they are cleared. `found_inf` is 1 if any element is inf or nan.
eng_status eng_params_unscale(int *found_inf, eng_params *set, double factor);
/// Writes the gradient of parameter `index`, divided by its relative scale and multiplied by
/// `factor` (usually 1 / loss scale), to `into`, an f32 tensor of the parameter's shape. The stored
/// gradient is unchanged. `has` is 0, and nothing is written, if the parameter has no gradient or
/// if, with ZeRO, another rank updates the parameter. Optimizers written in Lua use this function.
/// Errors: VALUE, DTYPE, SHAPE; STATE (with ZeRO, this rank has only a part of the parameter).
eng_status eng_params_true_gradient(int *has, const eng_tensor *into, eng_params *set, int index,
                                    double factor);
/// Sets the relative scale of parameter i's gradient to relative[i] (NULL: 1 each). If the
/// parameter has a gradient, the scale takes effect once that gradient is cleared. Statistics,
/// updates and unscaling divide by the scale. Errors: VALUE (not positive and finite).
eng_status eng_params_relative_scale(eng_params *set, const double *relative);
/// Begin and end a reference backward pass, which gives eng_record.norm_ref. Between the two calls
/// gradients accumulate in a separate f32 buffer; afterwards the set has its previous gradients
/// again. eng_params_reference_end returns the norm of each tensor's gradient (`norms` [n] or NULL;
/// 0: no gradient) and the norm of all gradients together, both divided by `scale`, the seed of the
/// pass. The calls do not nest. Errors: STATE.
eng_status eng_params_reference_begin(eng_params *set);
eng_status eng_params_reference_end(double *norm, double *norms, eng_params *set, double scale);
/// Returns sizes in bytes, in this order: master weights, low-precision copies, gradients (even
/// before the first backward pass allocates them), FP8 copies.
void eng_params_bytes(int64_t bytes[4], const eng_params *set);
/// Returns the number of elements in all parameters.
int64_t eng_params_count(const eng_params *set);
/// Returns one checksum of the master weights of all parameters i with which[i] == value, or of all
/// parameters if `which` is NULL: the XXH64 hash of their eng_checksum values, in order.
/// Returns 0 if it cannot be computed: the device fails, memory is short, or the weights are
/// currently divided among the ranks (zero=3).
uint64_t eng_params_checksum_of(const eng_params *set, const uint8_t *which, int value);

/// The fused optimizers: ENG_SGD and the other kinds that optimizers.def lists.
typedef enum eng_optimizer_kind {
#define ENG_OPTIMIZER(name, KIND, ...) ENG_##KIND,
#include "optimizers.def"
  ENG_OPTIMIZER_COUNT
} eng_optimizer_kind;

/// The largest number of moments that an optimizer has, and the number of the buffer with the
/// rounding errors of bf16 masters (eng_optimizer_moment).
enum { ENG_MOMENTS = 2, ENG_COMPENSATION = 0 };

/// What an optimizer does and takes: column `traits` of optimizers.def.
enum { ENG_COUPLED_DECAY = 1, ENG_BIAS_CORRECTION = 2, ENG_SPIKE_CLIP = 4, ENG_MOMENTUM = 8 };

/// A row of optimizers.def.
typedef struct eng_optimizer_info {
  const char *name;
  int32_t moments, traits;
  const char *hyper;            // "(.lr = 1e-2, .nesterov = false)"
} eng_optimizer_info;
/// Returns the row of optimizer `kind`, or NULL past the end.
const eng_optimizer_info *eng_optimizer_describe(int kind);
/// Returns all hyperparameters with their ranges (ENG_HYPER of optimizers.def): "lr=not_negative ".
const char *eng_hyper_ranges(void);

/// How an update rounds new weights to bf16 masters. nearest: to nearest, ties to even. stochastic:
/// up or down, as 16 random bits decide. The bits are a function of the seed, eng_update.draw, the
/// parameter and the element. kahan: to nearest; the rounding error is kept in bf16 and added to
/// the weight in the next update.
enum { ENG_ROUND_NEAREST = 0, ENG_ROUND_STOCHASTIC = 1, ENG_ROUND_KAHAN = 2 };

/// Hyperparameters of one group of parameters: lr, beta1 and the others that optimizers.def lists.
/// An optimizer ignores the fields it does not use.
typedef struct eng_hyper {
#define ENG_HYPER(name, type, range) type name;
#include "optimizers.def"
} eng_hyper;

/// The largest number of optimizers with lagged updates at the same time.
enum { ENG_UPDATE_SLOTS = 64 };

/// One update of all parameters.
typedef struct eng_update {
  int32_t kind;                 // ENG_SGD ...
  int32_t n_groups;
  const eng_hyper *groups;
  double  gradient_factor;      // 1 / scale
  // Limit on the magnitude of every gradient element after multiplication by gradient_factor. 0:
  // no limit.
  double  clip_value;
  // Number of this update, counted from 1, for bias correction. For lagged updates, this is the
  // number of the first update of an unbroken sequence of lagged updates. The device numbers the
  // following updates, because only the device knows which of them it applied.
  int64_t t;
  // eng_optimizer_step sets these three fields. slot: which of the device's ENG_UPDATE_SLOTS
  // counters numbers these updates. fresh: 1 if that counter restarts at t. statistics: the ticket
  // (backend.h: gradstats_start) of the statistics that a lagged update uses.
  int32_t slot, fresh;
  int64_t statistics;
  int32_t lagged;               // 1: the device skips the update if the newest statistics have inf
                                // or nan (gradstats_start in backend.h)
  double  clip_norm;            // limit on `norm` (clip_factor in base/numerics.h); 0: no limit
  // The norm of the gradients times gradient_factor, for clip_norm. Ignored in lagged updates: the
  // device computes the norm from its own statistics.
  double  norm;
  const double *clips;          // [n] factor on each parameter's gradient; NULL: 1 each
  // NULL, or [n][ENG_NORMS]: receives sums of squares, added up in a fixed order. For a parameter
  // without a gradient, and for every parameter if a lagged update is skipped, entry
  // ENG_NORM_UPDATE is 0 and the other entries are not written. On a card the call waits for the
  // sums, and a lagged update cannot compute them.
  double *norms;
  double  update_clip;          // limit on the norm of the change of all weights; 0: no limit
  double  spike_clip;           // with ENG_SPIKE_CLIP: limits |g| to sqrt(spike_clip v), where v is
                                // the second moment before the update; 0: off
  // eng_optimizer_step sets these two fields for update_clip. factor: multiplies the change of the
  // weights. dry: 1 for the pass that computes norms and writes nothing.
  double  factor;
  int32_t dry;
  // For bf16 masters. rounding: ENG_ROUND_*; eng_optimizer_step sets it. draw: a number that is
  // different for each update and determines the random bits. In lagged updates the device replaces
  // it by its own count of updates.
  int32_t rounding;
  int64_t draw;
} eng_update;

/// An optimizer's state for a parameter set: a flat buffer for each moment, filled with zeros at
/// first.
typedef struct eng_optimizer eng_optimizer;
/// Creates the state. `moment_dtype` is ENG_f32 or ENG_bf16. `group_of` gives each parameter's
/// index into eng_update.groups; NULL: 0 for each.
eng_status eng_optimizer_new(eng_optimizer **out, eng_params *set, int kind, int moment_dtype,
                             const int32_t *group_of);
void eng_optimizer_free(eng_optimizer *state);
/// Changes each parameter's index into eng_update.groups. Errors: VALUE.
eng_status eng_optimizer_groups(eng_optimizer *state, const int32_t *group_of);
/// Sets how updates round bf16 masters (ENG_ROUND_*); nearest at first. Drops the rounding errors
/// that kahan has kept. Errors: VALUE.
eng_status eng_optimizer_rounding(eng_optimizer *state, int rounding);
/// Updates every parameter that has a gradient. Errors: VALUE; STATE (a lagged update without
/// statistics); DEVICE (`norms` in a lagged update on a card).
eng_status eng_optimizer_step(eng_optimizer *state, const eng_update *update);
/// Makes the next update use the caller's t, even after lagged updates. Call this after restoring
/// moments.
void eng_optimizer_restart(eng_optimizer *state);
/// Returns a tensor over the optimizer's memory, for checkpoints: moment `which` of parameter
/// `index`, counted from 1, or its Kahan compensation (ENG_COMPENSATION). *out has slot 0 if this
/// optimizer has no such moment.
eng_status eng_optimizer_moment(eng_tensor *out, eng_optimizer *state, int which, int index);

// ------------------------------------------------------------------ captured steps

/// The forward and backward pass of one batch, captured once and then launched as one unit of work.
/// A graph helps steps whose kernels take less time than their launches. Gradients accumulate in
/// the set as usual.
typedef struct eng_graph eng_graph;
/// Begin and end a capture. Between the two calls the script runs one forward and backward pass in
/// an open step, and the device records their work without running it. `batch` lists the tensors
/// that the passes read and whose contents change from step to step. During the capture, operations
/// that draw random numbers fail, and so does reading a value. If a call fails, call
/// eng_graph_free. Errors: DEVICE (the device cannot capture), VALUE (too many tensors in `batch`,
/// or one that is not contiguous), DTYPE (the loss is not one f32 element), STATE.
eng_status eng_graph_begin(eng_graph **out, eng_params *set, const eng_tensor *batch, int n);
eng_status eng_graph_end(eng_graph *graph, const eng_tensor *loss);
/// Computes the step on the batch; `seed` is the gradient of the loss. Errors: SHAPE (the batch has
/// other addresses, shapes or dtypes than the captured one: run the step without the graph), VALUE
/// (as in eng_graph_begin), STATE (gradients, low-precision weights or FP8 copies have other
/// addresses or formats than at the capture, or the capture is not finished).
eng_status eng_graph_launch(eng_graph *graph, double seed, const eng_tensor *batch, int n);
/// Returns the loss of the last launch, as a tensor that is valid until the next launch. Errors:
/// STATE (the capture is not finished).
eng_status eng_graph_loss(eng_tensor *out, const eng_graph *graph);
/// Frees a captured step. NULL is allowed.
void       eng_graph_free(eng_graph *graph);

// ------------------------------------------------------------------ ranks

#include "engine_ranks.h"

// ------------------------------------------------------------------ devices, threads, randomness

/// Chooses the device by name: "cpu"; "reference", the slow reference kernels on the CPU; "cuda";
/// or "auto": "cuda" if a GPU can be used, else "cpu". Operations run on the current device and
/// accept only tensors in its memory. Errors: DEVICE; the text says what is missing.
eng_status eng_device_set(const char *name);
const char *eng_device_name(void);
/// Waits until the device has finished all work; returns the first error that occurred there.
eng_status eng_synchronize(void);
/// Returns one line about the current device: the GPU, or the CPU's instruction set.
const char *eng_device_text(void);
/// Returns which FP8 products are fast on the current device. 0: none (a GPU without FP8 tensor
/// cores). 1: products of operands that have one scale each. 2: all products. With
/// ENGINE_FP8_FORMULA=1 the value is 2, although a formula then computes all FP8 products: bit for
/// bit the same numbers, but many times slower. The value is also 2 on the CPU, which computes all
/// FP8 products in one way.
int eng_device_fp8(void);

/// The largest number of threads that kernels use.
enum { ENG_THREADS_MAX = 4096 };
/// Sets the number of threads of the kernels, at most ENG_THREADS_MAX; 0 leaves it unchanged.
/// Returns the current number.
int eng_threads(int n);

/// Measures the time of operations, with a row for each combination of operation and `detail`.
/// `on` = true clears the rows and begins the measurement; false ends it and keeps the rows.
/// Choosing a device also ends the measurement.
void eng_profile(bool on);
/// All calls of one operation with the same `detail`: their number and seconds, the bytes of their
/// inputs and outputs, and the floating-point operations of their matrix products (0 if they
/// compute no matrix products). `detail`: dtypes and shapes of the first two inputs, and the dtype
/// of the first output. Passes over parameters have rows such as "(optimizer)". Of at most 512
/// rows, the last one, "(all others)", sums up the calls for which there is no other row.
typedef struct eng_profile_row {
  const char *op;
  char    detail[104];
  int64_t calls;
  double  seconds, bytes, flops;
} eng_profile_row;
/// Fills up to `capacity` rows, in order of first use, and returns their number.
int eng_profile_rows(eng_profile_row *rows, int capacity);

/// Finds where inf and nan arise. `on` = true drops the findings and begins to check the first
/// ENG_TRAP_OUTPUTS outputs of every operation, which is slow; false ends the checks and keeps the
/// findings. Choosing a device also ends the checks.
void eng_trap(bool on);
/// Labels the following operations with a module number, which the caller chooses; 0 means no
/// module. Operations of the backward pass have the label of the operation whose gradient they
/// compute.
void eng_trap_module(int module);
enum { ENG_TRAP_INPUTS = 6, ENG_TRAP_OUTPUTS = 3 };
/// A tensor at the moment when inf or nan was found. `text`: dtype and shape; `name`: the
/// parameter's name, or "" if the tensor is not a parameter. count 0: the tensor is absent, empty
/// or not floating-point, or its values could not be read.
typedef struct eng_trap_tensor {
  char    name[96], text[80];
  int64_t count, inf, nan;
  double  amax;               // largest finite magnitude
} eng_trap_tensor;
/// An operation that produced inf (or nan). `kernel` is the operation that ran. `op` is the same
/// operation or, in the backward pass, the operation whose gradient `kernel` computed.
typedef struct eng_trap_site {
  const char *kernel, *op;
  int32_t nan, backward, module;
  // Index, from 1, of the first input (of the first ENG_TRAP_INPUTS) that contained inf (nan)
  // before the call, such as data, a parameter or a constant. 0: inf (nan) arose in this operation.
  int32_t held_by;
  int32_t n_in, n_out;
  eng_trap_tensor in[6], out[3];
} eng_trap_site;
/// Searches the operations of a pass for the first one that produced inf although its inputs had
/// none. If there is none, finds the first operation that had inf in its inputs and its outputs.
/// `nan`: looks for nan instead of inf. Returns false if no checked output had inf (nan).
bool eng_trap_found(eng_trap_site *out, bool nan, bool backward);

/// Returns the instruction set that the CPU kernels use: "avx512", "avx2" or "plain". `force` is
/// the set to use from now on; NULL changes nothing. Returns NULL, with an error, if the machine
/// lacks that set.
const char *eng_cpu_isa(const char *force);
/// Returns how the CPU computes bf16 products: "AMX" (oneDNN), "pairs" (AVX-512 BF16 instructions,
/// on CPUs where they are twice as fast as f32) or "f32". The first two treat subnormal bf16 as
/// zero. With "pairs", attention also uses these instructions and rounds its probabilities to bf16,
/// as a GPU does.
const char *eng_cpu_bf16(void);

/// Read and set the random generator's state: a seed, and `counter`, the number of Philox blocks
/// drawn. eng_seed sets the counter to 0. The same state always gives the same numbers.
void eng_seed(uint64_t seed);
void eng_rng_get(uint64_t *seed, uint64_t *counter);
void eng_rng_set(uint64_t seed, uint64_t counter);

/// Sets the interrupt level; signal handlers may call this. 0: no interrupt. 1: the trainer stops
/// at the end of the step. 2: the next operation fails with ENG_ERR_INTERRUPTED. eng_interrupted
/// returns the level.
void eng_interrupt(int level);
int  eng_interrupted(void);
/// Records the number of the signal that caused the interrupt; 0 only queries. Returns the number
/// recorded last, or 0 if there is none.
int  eng_interrupt_signal(int number);
/// Sets what the first Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 or SIGXCPU does. 0, the default: sets
/// level 2 and stops the script. 1: sets level 1, for a training loop, which then finishes its
/// current step, ends, and sets policy 0 again. 2: sets level 2 without stopping the script, for a
/// caller that waits inside a call; the call then returns, and the caller prints its own message.
/// -1 only queries. Returns the previous value. A terminal that closes during a training loop
/// counts as Ctrl-C.
int  eng_interrupt_policy(int policy);
/// SIGHUP makes a run reload its policy's file. The signal handler calls eng_hangup. eng_hangups
/// returns the number of signals since its last call.
void eng_hangup(void);
int  eng_hangups(void);

// ------------------------------------------------------------------ the machine

/// Returns the time of a monotonic clock in seconds; only differences are meaningful.
double eng_clock(void);
/// Sets *columns and *rows to the size of the terminal on file descriptor `fd`, or to 80 and 24 if
/// the size is unknown. Returns false if `fd` is not a terminal.
bool eng_terminal(int *columns, int *rows, int fd);
/// Waits; a signal ends the wait early.
void eng_sleep(double seconds);
/// Starts the program words[0], found in PATH. `words` are its arguments, ended by NULL. The
/// program has an empty standard input, its output is appended to the file `log`, it has a process
/// group of its own, and it gets SIGTERM when the calling thread ends. Errors: IO.
eng_status eng_process_start(int *process, const char *const *words, const char *log);
/// Returns the exit status of a started program, 128 + N if signal N ended it, -1 while it runs, or
/// 255 if `process` is not a child of this process. Do not call this again after it has returned an
/// exit status.
int eng_process_status(int process);
/// Sends a signal to the process group of a started program.
void eng_process_signal(int process, int number);
/// Returns the version of "onednn" (with the instruction set it uses), "sqlite" or "openmp" as
/// text, or NULL if there is no such library.
const char *eng_library_version(const char *name);
/// Writes x as decimal text that reads back as the same double: up to 15 digits, or 16 or 17 if it
/// needs them. The text is the same in any locale: "0.1", "3", "1e-30", "-0.0", "inf", "-inf",
/// "nan". The engine's text files have all numbers in this form.
void eng_number_text(char out[32], double x);
/// Makes text of unknown origin safe to print: valid UTF-8 without characters that a terminal
/// executes (C0, C1) or that reorder the text after them (bidirectional marks). The bytes of such
/// characters, and bytes that are not UTF-8, become \xNN. Line feeds and tabs stay if `lines`, else
/// they become spaces. Writes whole characters, at most `room` bytes including the final 0. Returns
/// the length in bytes that the result would have without this limit.
int64_t eng_text_shown(char *out, int64_t room, const char *text, int64_t size, bool lines);
/// Says what is wrong with the name of a policy, an option, a run or a signal: it is empty, longer
/// than ENG_NAME_BYTES, or eng_text_shown would change it. Returns NULL if the name is valid.
const char *eng_name_problem(const char *name, int64_t size);
enum { ENG_NAME_BYTES = 100 };
/// Returns the index in `names` [n] of the name that `name` probably misspells: the name with the
/// smallest edit distance (insert, delete, replace, or swap two adjacent characters; ASCII case
/// ignored). Returns -1 if every distance exceeds both 1 and a third of the longer name's bytes. A
/// name whose last dotted part equals `name` has distance 1 ("width" finds "model.width"). Of equal
/// distances the first wins. Names longer than 64 bytes never match.
int eng_nearest(const char *name, const char *const *names, int n);
/// Queries the CUDA driver, if installed, without linking to it. Returns the number of GPUs, or -1
/// without a working driver. Writes a line about each GPU into `text` [size].
int eng_gpu_probe(char *text, int size);

// ------------------------------------------------------------------ files, attach, history

#include "engine_files.h"

// ------------------------------------------------------------------ tokenizers

#include "engine_tokenizer.h"

#ifndef ENG_CDEF
#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
#endif
