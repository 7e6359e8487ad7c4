// The structures of eng_parallel, a parameter set whose gradients are reduced over ranks, and the
// functions that the files on gradients and weights share (README.md). Included by this folder.
#pragma once

#include "comm.h"
#include "params/params.h"
#include "tensor/pool.h"

enum { HAS_GRADIENT = 1 };    // a bit of eng_parallel.rank_flags, besides the bits of wire.h

// A bucket goes through these states in order. In FILLS, the backward pass has not yet computed the
// gradients of all members. In OUT, each rank sends every other rank the piece that the other rank
// sums. In BACK, each rank sends its sums to all other ranks. Gradients on cards skip BACK: their
// bucket stays in OUT until the sums have arrived.
typedef enum bucket_state { BUCKET_FILLS, BUCKET_OUT, BUCKET_BACK, BUCKET_DONE } bucket_state;

/// Gradients of one dtype that are sent together. A bucket is the concatenation of its members,
/// each padded to a multiple of 128 elements; rank r sums the piece [cut[r], cut[r+1]). Cuts are at
/// members' ends or at multiples of 4096 inside a member, so that the statistics of the pieces add
/// up exactly to the statistics of the whole member.
typedef struct bucket {
  eng_comm *comm;             // the group that sums the gradients: all ranks, or the holders
  int32_t  n;                 // members
  int32_t  dtype;             // of the gradients
  int32_t  comm_dtype;        // of the messages (ENG_e4m3: with scales)
  int32_t *member;            // [n]
  int64_t *at;                // [n + 1] the bucket's element at which each member begins
  int64_t *cut;               // [ranks + 1] the bucket's element at which each rank's piece begins
  int64_t *begin;             // [ranks + 1] byte offsets in `out` of the message to each rank;
                              // later, byte offsets in `in` of the sums from each rank. A message
                              // is a packed piece and n flag bytes
  int64_t  packed;            // size in bytes of this rank's packed piece
  int64_t  bytes;             // `packed` plus n flag bytes, rounded up to COMM_ALIGN
  int64_t  in_bytes;          // size of `in`
  int64_t  need;              // total size of `out`, `in` and `sum`
  char    *out, *in;          // NULL unless the bucket is in flight. out: the messages to all
                              // ranks; in: the messages from all ranks, `bytes` apart, and later
                              // the sums
  char    *sum;               // [packed] sum of this rank's piece
  uint8_t *anyone;            // [n] whether any rank had a gradient for the member
  bucket_state state;
  int32_t  left;              // members whose gradients backward has not completed
  void    *exchange;
  void    *mark;              // cards: the position in the stream after all work on this bucket
} bucket;

struct eng_parallel {
  heap        memory;         // of the buckets and of the lists below
  eng_params *set;
  eng_comm   *comm, *holders; // all ranks; the ranks that hold the same `apart` parameters as this
                              // rank, or NULL
  uint8_t    *apart;          // [set->n] 1: not all ranks hold this parameter
  int32_t    *holder;         // [size of holders] the holders' ranks in `comm`
  // 0: nothing is divided among ranks; 1: updates are divided; 2: gradients too. With ZeRO-3 it is
  // 2, and set->parted describes the divided weights.
  int32_t     zero;
  bool        whole;          // pieces are whole parameters
  int32_t     n_buckets;
  int32_t     under_way;      // buckets in flight
  int64_t     arrived;        // number of completed exchanges of buckets
  bucket     *buckets;
  int32_t    *order;          // [n_buckets] the order in which all ranks send buckets
  int32_t     next;           // index into `order` of the next bucket to send
  pool        messages_pool;  // buckets in flight, bounded
  pool        rooms;          // ZeRO-2 and ZeRO-3: gradients that are not yet packed
  void       *table;          // the runs to pack or unpack; with `cards` a bucket's table, before
                              // it goes to the card
  uint32_t   *own_flags;      // [set->n] bits of wire.h for this rank's gradients
  bool        cards;          // gradients go from card to card. comm_cards.c then uses:
  uint32_t   *flags;          //   [set->n] own_flags on the card
  uint8_t    *pass_flags;     // [ranks][set->n] flags of each rank in this pass
  int64_t     flags_bytes;
  tensor    **place;          // ZeRO-2: [set->n] gradients that are not yet packed. data is NULL
                              // before backward begins the gradient, and after it is packed
  bool       *had;            // ZeRO-2: [set->n] this rank's piece of the gradient holds a sum of
                              // earlier passes of this step
  int32_t    *bucket_of;      // [set->n] the index of each member's bucket
  bool       *complete;       // [set->n] backward has completed the gradient
  uint8_t    *rank_flags;     // [ranks][set->n] flags of each rank in the last reduction
  int64_t     n_values;
  float      *values;         // [n_values] work space for the f32 numbers of any one member.
                              // Without `cards`, also for the terms that sum_piece and
                              // unpack_bucket add, such as this rank's piece from each rank
  char       *raw;            // host copy of a member's gradient that is on a device
  comm_message *messages;     // [2 * ranks] the messages of one exchange
  const float **terms;        // [ranks] the pieces that sum_piece sums
  double     *numbers;        // comm_record.c's message
  int64_t     n_numbers;
  bool        armed;          // between eng_parallel_begin and eng_parallel_finish
  bool        alone;          // this pass is not reduced; with ZeRO-2 its gradients are dropped
  bool        broken;         // a step failed while messages were in flight
  double      first;          // eng_clock when this pass sent its first bucket; 0: none sent
  eng_parallel_facts facts;
  // Traffic of weights under ZeRO-3 since the last reduction. messages and bytes: what this rank
  // sent. exchanges: how often this rank fetched the weights of a unit (comm_weights.c). seconds:
  // the time that this took.
  struct { int64_t messages, bytes, exchanges; double seconds; } brought;
  uint32_t brought_in;        // a checksum of the order in which units were fetched
  struct { void *exchange; char what[90]; } coming;   // the unit that is being received
};

// ---- comm_buckets.c

/// Checks the options. Errors: VALUE.
eng_status buckets_check(const eng_parallel_options *options);
/// Puts the set's members into buckets and sets the order in which the buckets are sent.
eng_status buckets_fill(eng_parallel *p, const eng_parallel_options *options);
/// Cuts a bucket, whose index is `number`, into the ranks' pieces and computes the sizes of its
/// messages.
eng_status bucket_cut(eng_parallel *p, bucket *b, int number);
/// Computes the size in bytes of the single block for messages in flight, and the size of each
/// block of `rooms`. `limit`: eng_parallel_options.bucket.
void buckets_bounds(int64_t *messages, int64_t *room_block, const eng_parallel *p, int64_t limit);
/// Returns how many elements of member k are in the piece of `rank`. The first of them has index
/// `from` in the member and `at` in the piece.
int64_t bucket_overlap(const eng_parallel *p, const bucket *b, int k, int rank, int64_t *from,
                       int64_t *at);
/// Lists in `runs` the parts of the members' gradients and their places in the messages. back: the
/// runs to unpack, from the sums that this rank has; their slots are indices into b->member.
/// Otherwise: the runs to pack, whose slots are indices of the set's members. Returns the number of
/// runs; `longest` receives the element count of the longest one. A run is the part of one member
/// that lies in one piece, so n members in r pieces have at most n + r runs.
int bucket_runs(wire_run *runs, int64_t *longest, const eng_parallel *p, const bucket *b,
                bool back);
/// Computes the range [from, to) of elements of member `index` that rank `rank` owns. set->own has
/// this rank's ranges for all members.
void member_owned(int64_t *from, int64_t *to, const eng_parallel *p, int index, int rank);
/// Lists in p->messages the messages between this rank and the other ranks of the bucket's group.
/// Returns their number, and adds the sent ones to p->facts. back: the messages carry sums;
/// otherwise they carry gradients.
int bucket_messages(eng_parallel *p, const bucket *b, bool back);
/// Lists the messages in which the ranks that hold member `index` send their pieces to each other,
/// and returns their number; if `messages` is NULL, only counts. Adds the number of messages from
/// this rank to `sent`, and their bytes to `bytes`. data: the member's elements in `dtype`. whole:
/// 0, or the number of elements of a member that is not cut.
int piece_messages(comm_message *messages, int64_t *sent, int64_t *bytes, const eng_parallel *p,
                   int index, char *data, int dtype, int64_t whole);
/// Returns the number of elements in the piece of `rank`.
static inline int64_t bucket_piece(const bucket *b, int rank)
{ return b->cut[rank + 1] - b->cut[rank]; }
/// Returns the size in bytes of member i's whole gradient, in the dtype in which backward writes
/// it.
static inline int64_t member_room(const eng_params *set, int i)
{ return set->member[i].value->count * eng_dtype_size(set->gradient_dtype[i]); }

// ---- comm_weights.c

/// ZeRO-3: from now on this rank keeps only its own pieces of the weights and fetches the other
/// pieces when it uses them. units [set->n]: the unit of each member.
eng_status weights_part(eng_parallel *p, const int32_t *units);
/// ZeRO-3: predicts the memory for weights, and the messages that carry weights in a step, from the
/// operations on the tape.
eng_status weights_predict(eng_parallel_sizes *out, eng_parallel *p, const int64_t *own,
                           const int32_t *units);

// ---- comm_cards.c

enum { COMM_ALIGN = 16 };
/// Returns how many bytes of memory a bucket takes while it is in flight.
int64_t cards_bytes(const bucket *b);
eng_status cards_new(eng_parallel *p);
void cards_free(eng_parallel *p);
/// Begins a pass.
eng_status cards_begin(eng_parallel *p);
/// Enqueues all work on a complete bucket whose `out` and `in` are set.
eng_status cards_send(eng_parallel *p, bucket *b);
/// Sets *done to whether the work of cards_send is done. Never waits.
eng_status cards_done(bool *done, eng_parallel *p, bucket *b);
/// Exchanges the ranks' flags (p->pass_flags) after all buckets are done.
eng_status cards_exchange_flags(eng_parallel *p);
