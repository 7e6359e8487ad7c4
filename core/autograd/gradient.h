// Gradients: what a gradient rule is given and how it hands its results over. See gradient.c.
// Called by the rules (grad_*.c, fp8/) and by backward.c.
#ifndef ENG_GRADIENT_H
#define ENG_GRADIENT_H

#include "tape.h"

/// A node, and the gradient of each of its outputs (NULL: it has none).
typedef struct grad_call {
  const op_call *call;
  tensor *dy[ENG_OP_OUTPUTS];
  double  carry;        // of the node: what dy carries, and what the rule computes
} grad_call;

/// A gradient rule: computes the gradients that are wanted and hands them over with grad_emit.
typedef eng_status grad_rule(grad_call *g);
/// Registers the rule of an operation that ops.def calls `registered`. In backward.c.
void grad_register(int op, grad_rule *rule);

/// True when input k exists and requires a gradient.
bool grad_wants(const grad_call *g, int k);

/// Gives the gradient of input k and takes ownership of `dx`. It is summed over broadcast
/// dimensions to the input's shape, brought from the node's carry to the input's, and rounded to
/// the input's dtype.
eng_status grad_emit(grad_call *g, int k, tensor *dx);

/// The memory for input k's gradient, when it is a parameter: a rule can write there directly
/// (adding when *accumulate) instead of emitting. NULL otherwise, and where it carries another
/// factor.
tensor *grad_target(grad_call *g, int k, bool *accumulate);
/// Takes that back when the rule failed to write there.
void grad_target_failed(grad_call *g, int k, bool accumulate);

/// Another tensor over the same memory, for a gradient that goes to two places.
eng_status grad_share(tensor **out, tensor *x);

/// Rules that the FP8 layers share: of swiglu with its inputs, of attention with its output y
/// given.
eng_status grad_swiglu_of(grad_call *g, tensor *gate, tensor *up);
eng_status grad_attention_of(grad_call *g, tensor *y);

// ---- for backward.c

/// What the gradient of x carries: that of the operation that made it, or of its parameter, else 1.
double gradient_carry(const tensor *x);
/// Hangs dx at x, and drops what hangs there.
void gradient_hang(tensor *x, tensor *dx);
void gradient_drop(tensor *x);
/// Drops the gradients of leaves outside parameter sets.
void gradient_drop_leaves(void);
/// Gives memory to the gradient of a parameter whose set has none of its own (ZeRO-2). NULL ends
/// it.
typedef eng_status gradient_place(void *data, struct parameter *p);
void gradient_set_place(gradient_place *place, void *data);

#endif
