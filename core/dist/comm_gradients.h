// A parameter set whose gradients are reduced over ranks: comm_buckets.c makes and frees it, comm_gradients.c works with it in a step,
// comm_record.c reads it.
#ifndef ENG_COMM_GRADIENTS_H
#define ENG_COMM_GRADIENTS_H

#include "comm.h"
#include "params/params.h"
#include "tensor/pool.h"

enum { HAS_GRADIENT = 1 };         // beside wire.h's bits, of eng_parallel.brought

typedef enum bucket_state { BUCKET_FILLS, BUCKET_OUT, BUCKET_BACK, BUCKET_DONE } bucket_state;

/// Gradients of one format that travel together. Its elements are those of its members one after the other, each padded to a multiple of
/// 128; rank r sums the piece [cut[r], cut[r+1]) of them. Cuts are at members' ends or at multiples of 4096 inside one, so that statistics
/// of pieces add up as those of the whole do.
typedef struct bucket {
  eng_comm *comm;             // whose gradients are added up: all ranks', or those of the holders
  int32_t  n, dtype, wire;    // members; their gradients' format, and the one they travel in (a dtype; ENG_e4m3 with scales)
  int32_t *member;            // [n]
  int64_t *at;                // [n + 1] where each begins
  int64_t *cut;               // [ranks + 1] elements
  int64_t *begin;             // [ranks + 1] bytes: where the message to each rank begins in `out`, its sum in `in`: a packed piece, n flags
  int64_t  packed, bytes;     // the own piece in the wire's format; and with flags
  int64_t  in_bytes, need;    // of `in`; of all three below
  char    *out, *in;          // while it is under way, else NULL: what goes to each rank; what came from each, `bytes` apart, then the sums
  char    *sum;               // [packed] the own piece's
  uint8_t *anyone;            // [n] whether some rank had a gradient for it
  bucket_state state;
  int32_t  left;              // members that are not complete
  void    *exchange;
  void    *mark;              // cards: behind all that is to be done with it
} bucket;

struct eng_parallel {
  eng_params *set;
  eng_comm   *comm, *holders; // all ranks; those that hold the parameters that stand apart here (may be NULL)
  uint8_t    *apart;          // [set->n] 1: not all ranks hold it
  int32_t    *holder;         // [holders' size] their ranks among all
  int32_t     zero;           // 0; 1: updates are shared out; 2: gradients, too
  int32_t     n_buckets, under_way;
  bucket     *buckets;
  int32_t    *order;          // [n_buckets] in which they go out on all ranks: by the lowest of their members, the last one first
  int32_t     next;           // of `order`
  pool        messages_pool, rooms;   // for what is under way, which is bounded; for what backward writes (ZeRO-2)
  bool        cards;          // gradients lie on cards that talk to each other: comm_cards.c's way, for which are
  void       *table;          // what the device is told of a bucket
  uint32_t   *flags, *own_flags;      // [set->n] on the card, and here: wire.h's bits
  uint8_t    *told;           // [ranks][set->n] what was brought to this pass
  int64_t     flags_bytes;
  tensor    **place;          // ZeRO-2: [set->n] each member's gradient as backward writes it; data NULL: not begun, or packed
  bool       *had;            // ZeRO-2: [set->n] earlier passes of this step left a sum in the own piece
  int32_t    *bucket_of;      // [set->n]
  bool       *complete;       // [set->n] told by the tape
  uint8_t    *brought;        // [ranks][set->n] of the last reduction
  int64_t     n_values;
  float      *values;         // [n_values] [ranks][own piece] of the largest bucket: pieces as f32; at least the largest member
  char       *raw;            // a member's gradient brought to the host, where it lies elsewhere
  comm_message *messages;     // [2 * ranks]
  const float **terms;        // [ranks]
  double     *numbers;        // comm_record.c's message
  int64_t     n_numbers;
  bool        armed;
  bool        alone;          // this pass is nobody else's business: its gradients are forgotten as they are complete
  bool        broken;         // a step failed while messages were under way
  double      first;          // when the first bucket of this reduction started
  eng_parallel_facts facts;
};

/// comm_buckets.c, for comm_predict.c too: what is wrong with options; the set's members in buckets, in the order these go out; one's pieces
/// and what it needs while it is under way; bytes for the messages under way, and of a block of rooms; giving buckets back.
eng_status buckets_check(const eng_parallel_options *options);
eng_status buckets_fill(eng_parallel *p, const eng_parallel_options *options);
eng_status bucket_cut(bucket *b, int number);
void buckets_bounds(int64_t *messages, int64_t *room_block, const eng_parallel *p, int64_t limit);
void buckets_free(eng_parallel *p);
/// Bytes of a member's gradient as backward writes it.
static inline int64_t member_room(const eng_params *set, int i) { return set->member[i].value->count * eng_dtype_size(set->gradient_dtype[i]); }

/// Elements of piece `rank`.
static inline int64_t bucket_piece(const bucket *b, int rank) { return b->cut[rank + 1] - b->cut[rank]; }
/// How many elements member k has in piece `rank`: from which of its own on, and where they begin in the piece.
int64_t bucket_overlap(const eng_parallel *p, const bucket *b, int k, int rank, int64_t *from, int64_t *at);

/// comm_cards.c. Bytes of a bucket that is under way; making and freeing what it owns; the beginning of a pass.
enum { COMM_ALIGN = 16 };
int64_t cards_bytes(const bucket *b);
eng_status cards_new(eng_parallel *p);
void cards_free(eng_parallel *p);
eng_status cards_begin(eng_parallel *p);
/// Asks for all that is to be done with a complete bucket, whose `out` and `in` are there; and whether it is done, which never waits.
eng_status cards_send(eng_parallel *p, bucket *b);
eng_status cards_done(bool *done, eng_parallel *p, bucket *b);
/// When all are done: everybody tells everybody what was brought (p->told).
eng_status cards_tell(eng_parallel *p);

#endif
