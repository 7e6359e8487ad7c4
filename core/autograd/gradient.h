// Gradients: the input and output of gradient rules. See gradient.c. Called by the rules (grad_*.c,
// fp8/) and by backward.c.
#ifndef ENG_GRADIENT_H
#define ENG_GRADIENT_H

#include "tape.h"

/// A node, and the gradient of each of its outputs (NULL: none).
typedef struct grad_call {
  const op_call *call;
  tensor *dy[ENG_OP_OUTPUTS];
  double  relative_scale;   // the node's: that of dy and of the rule's results
} grad_call;

/// A gradient rule: computes the gradients that are wanted and emits them with grad_emit.
typedef eng_status grad_rule(grad_call *g);
/// Registers the rule of an operation marked `registered` in ops.def. In backward.c.
void grad_register(int op, grad_rule *rule);

/// True when input k exists and requires a gradient.
bool grad_wants(const grad_call *g, int k);

/// Emits `dx` as the gradient of input k and takes ownership of it. grad_emit sums dx over
/// broadcast dimensions to the input's shape, rescales it from the node's relative scale to the
/// input's, and rounds it to the input's dtype.
eng_status grad_emit(grad_call *g, int k, tensor *dx);

/// The dtype in which a kernel should return the gradient of input k: the input's, but at least f32
/// where grad_emit still multiplies it, so that it is rounded once.
int grad_dtype(const grad_call *g, int k);

/// The memory of input k's gradient if that input is a parameter with the node's relative scale;
/// else NULL. The rule can write there (adding if *accumulate) instead of emitting.
tensor *grad_target(grad_call *g, int k, bool *accumulate);
/// Cancels grad_target after the rule failed to write.
void grad_target_failed(grad_call *g, int k, bool accumulate);

/// Runs an operation of one output whose result the rule computes with further: the output is f64
/// if an input is, else f32, so that the intermediate value is neither rounded nor overflows.
eng_status grad_run_wide(tensor **out, op_call c);

/// A second tensor over the same memory, for a gradient with two destinations.
eng_status grad_share(tensor **out, tensor *x);

/// Rules shared with FP8 layers: swiglu's for given inputs, attention's for a given output y.
eng_status grad_swiglu_of(grad_call *g, tensor *gate, tensor *up);
eng_status grad_attention_of(grad_call *g, tensor *y);

// ---- for backward.c

/// The relative scale of x's gradient: that of the operation that computed x, or of its parameter,
/// else 1.
double gradient_relative_scale(const tensor *x);
/// Makes dx the gradient of x and drops the previous one.
void gradient_hang(tensor *x, tensor *dx);
void gradient_drop(tensor *x);
/// Drops the gradients of leaves outside parameter sets.
void gradient_drop_leaves(void);
/// Allocates the gradient of a parameter whose set has no gradient memory (ZeRO-2). NULL removes
/// the function.
typedef eng_status gradient_place(void *data, struct parameter *p);
void gradient_set_place(gradient_place *place, void *data);

#endif
