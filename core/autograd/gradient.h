// Gradient rules: their arguments, and the functions with which they emit gradients. See
// gradient.c. Called by the rules (grad_*.c, fp8/) and by backward.c.
#pragma once

#include "tape.h"

/// The arguments of a gradient rule: a node, and the gradient of each of its outputs (NULL: none).
typedef struct grad_call {
  const op_call *call;
  tensor *dy[ENG_OP_OUTPUTS];
  double  relative_scale;   // of the node: a factor in dy, and hence in the rule's results
  bool    last;             // the tape is dropped after this pass
} grad_call;

/// A gradient rule: computes the gradients that are wanted and emits them with grad_emit.
typedef eng_status grad_rule(grad_call *g);
/// Registers the rule of an operation marked `registered` in ops.def. Defined in backward.c.
void grad_register(int op, grad_rule *rule);

/// Whether input k exists and requires a gradient.
bool grad_wants(const grad_call *g, int k);

/// Emits `dx` as the gradient of input k and takes ownership of it; drops it if input k requires no
/// gradient. grad_emit sums dx over broadcast dimensions to the input's shape, rescales it from the
/// node's relative scale to the input's, and rounds it to the input's dtype. It adds a parameter's
/// dx to its gradient, rounded first if params_sums_terms says so; otherwise only the sum is
/// rounded.
eng_status grad_emit(grad_call *g, int k, tensor *dx);
/// Runs an operation that has one output and emits the result as the gradient of input k.
eng_status grad_emit_op(grad_call *g, int k, op_call c);
/// Emits a second tensor over dx's memory as the gradient of input k. The caller keeps `dx`.
eng_status grad_emit_shared(grad_call *g, int k, tensor *dx);

/// Returns the dtype in which a kernel should compute the gradient of input k: the input's dtype,
/// or f32 if the input is f16 or bf16 and grad_emit will still rescale the gradient. So the
/// gradient is rounded only once.
int grad_dtype(const grad_call *g, int k);

/// Returns the gradient buffer of input k if that input is a parameter with the node's relative
/// scale, or NULL if the rule must emit the gradient: for all other inputs, and for a parameter
/// whose terms are rounded before they are summed (params_sums_terms) or whose gradient gets no
/// memory. The rule can write the gradient into this buffer instead of emitting it; if *accumulate
/// is true, the rule must add to the contents.
tensor *grad_target(grad_call *g, int k, bool *accumulate);
/// Cancels grad_target after the rule failed to write.
void grad_target_failed(grad_call *g, int k, bool accumulate);
/// Runs an operation whose output is the gradient of input k. The output is written into
/// grad_target's buffer if there is one, else emitted. `add` points to the attribute of `c` that
/// makes the kernel add to its output.
eng_status grad_run_to(grad_call *g, int k, op_call *c, int64_t *add);

/// Creates a tensor of zeros.
eng_status grad_zeros(tensor **out, int dtype, int ndim, const int64_t *shape);

/// Runs an operation that has one output, for a rule that uses the result as an intermediate value.
/// The output is f64 if an input is, else f32: a narrower format could round the value or overflow.
eng_status grad_run_wide(tensor **out, op_call c);

/// Creates a second tensor over x's memory, for a gradient with two destinations.
eng_status grad_share(tensor **out, tensor *x);

/// Runs `c`, the gradient operation of a norm with the inputs x, weight and bias, and emits their
/// gradients. Sets the attributes dtype and affine of `c`.
eng_status grad_norm_of(grad_call *g, op_call *c);
/// grad_swiglu_of computes and emits the gradients of swiglu for the inputs `gate` and `up`.
/// grad_attention_of computes and emits the gradients of attention for the output `y`. The rules of
/// FP8 layers also call these functions.
eng_status grad_swiglu_of(grad_call *g, tensor *gate, tensor *up);
eng_status grad_attention_of(grad_call *g, tensor *y);

// ---- for backward.c

/// Returns the relative scale of x's gradient: the parameter's, if x is a parameter; the node's, if
/// a node computed x; else 1.
double gradient_relative_scale(const tensor *x);
/// gradient_attach makes dx the gradient of x; the caller must have dropped any previous gradient.
/// gradient_drop drops the gradient of x.
void gradient_attach(tensor *x, tensor *dx);
void gradient_drop(tensor *x);
/// During a capture, stores the address of `seed`, the loss's gradient; each launch first writes
/// the gradient's value there. Returns false if no capture is running (capture.c).
bool capture_takes_seed(const tensor *seed);
/// Drops the gradients of leaves outside parameter sets.
void gradient_drop_leaves(void);
/// A function that allocates the gradient of a parameter whose set has no gradient memory (ZeRO-2
/// and 3). gradient_set_place sets it; NULL removes it.
typedef eng_status gradient_place(void *data, struct parameter *p);
void gradient_set_place(gradient_place *place, void *data);
