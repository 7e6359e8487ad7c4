// Part of engine.h, which includes it: several processes on one job. Groups and their operations, gradients that are reduced, experts'
// rows, what it would all cost. Nothing else includes it.
#ifndef ENGINE_RANKS_H
#define ENGINE_RANKS_H

/// Several processes ("ranks") on one job, started by mpirun, srun or the like. A group holds some of them, numbered from 0; the
/// world all. Every rank of a group calls the same operations in the same order. Memory is the host's.
typedef struct eng_comm eng_comm;
enum { ENG_SUM = 0, ENG_MAX = 1 };

/// What the environment says: whether this process was started as one of several, which, and of how many (1 when it was not). Starts nothing.
bool eng_comm_launched(int *rank, int *size);
/// The world. The first call loads the transport where this process was started as one of several: MPI where mpirun or srun with an MPI plug-in
/// did it, NCCL alone where torchrun did (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or srun without (SLURM_PROCID, MASTER_ADDR).
/// ENGINE_RANKS=off: never, mpi or nccl: that one, also alone. Alone it is a world of one.
/// Errors: LIBRARY (no MPI in this build, or one that does not see the others; no NCCL), DEVICE (NCCL without a card).
eng_status eng_comm_world(eng_comm **out);
int eng_comm_rank(const eng_comm *comm);
int eng_comm_size(const eng_comm *comm);
/// Ranks of the world on this machine.
int eng_comm_local_size(void);
/// This machine's cores shared out among its ranks: threads that each may well use.
int eng_comm_threads(void);
/// "Open MPI v4.1.4, 4 ranks, 4 of them here", and, once gradients that lie on cards are to be reduced, whether they go from card to card over
/// NCCL or through the host, and why.
const char *eng_comm_text(void);
/// "2.28.9, /usr/local/cuda/lib64/libnccl.so.2": the NCCL that would be used. Errors: LIBRARY, saying what is missing.
eng_status eng_comm_nccl(const char **text);
/// Part of a group: those who give the same color, ordered by key and rank. Color -1: in no part (NULL in out).
eng_status eng_comm_split(eng_comm **out, eng_comm *parent, int color, int key);
/// NULL and the world are fine.
void eng_comm_free(eng_comm *comm);
/// How long a rank waits for others (300 s at first) until it ends the job with a message that names them; 0 only asks. Gives what was in force.
double eng_comm_timeout(double seconds);
/// The last call of a process, made by itself when it exits: code 0 waits for the others, any other ends them too. Fine without ranks.
void eng_comm_end(int code);

/// Waits until every rank of the group has called it.
eng_status eng_comm_barrier(eng_comm *comm);
/// Copies `bytes` of host memory from rank `root` to all ranks of the group.
eng_status eng_comm_broadcast(eng_comm *comm, void *data, int64_t bytes, int root);
/// Values of a contiguous tensor, wherever it lies, from `root`.
eng_status eng_comm_broadcast_tensor(eng_comm *comm, const eng_tensor *x, int root);
/// `bytes` of every rank, in order of ranks; all [size x bytes].
eng_status eng_comm_all_gather(eng_comm *comm, void *all, const void *own, int64_t bytes);
/// In place, over f32, f64 or i64; op ENG_SUM or ENG_MAX (NaN wins). Sums have one order (core/dist/comm.h): the same numbers give the same
/// sum, bit for bit, on every rank and in every run. Errors: DTYPE.
eng_status eng_comm_all_reduce(eng_comm *comm, void *data, int64_t count, int dtype, int op);
/// Rank r gets elements [r * count, (r+1) * count) of the reduction of `data` [size x count]; bit-equal to the all-reduce.
eng_status eng_comm_reduce_scatter(eng_comm *comm, void *own, const void *data, int64_t count, int dtype, int op);
/// The same without waiting. Every start needs its wait; test tells whether waiting would take no time, and moves things on.
typedef struct eng_comm_request eng_comm_request;
eng_status eng_comm_all_reduce_start(eng_comm_request **out, eng_comm *comm, void *data, int64_t count, int dtype, int op);
eng_status eng_comm_test(bool *done, eng_comm_request *request);
eng_status eng_comm_wait(eng_comm_request *request);

/// Rows of `from` [n x C] to the ranks of a group, and theirs into `to` [m x C], of one dtype and memory: the first send[0] rows go to rank 0,
/// the next send[1] to rank 1; rank 0's come first. On the way they have a wire's format (below), FP8 in blocks along a row, where inf
/// becomes nan; rows for oneself, too. To what stands in `facts` (may be NULL) is added: bytes sent to others, and over finite numbers the
/// sums of squares of what was sent and of the error that its format made. Errors: SHAPE, VALUE.
typedef struct eng_exchange_facts { int64_t bytes; double signal, error; } eng_exchange_facts;
eng_status eng_comm_exchange_rows(const eng_tensor *to, const eng_tensor *from, eng_comm *comm, const int64_t *send, const int64_t *receive, int comm_dtype,
                                  eng_exchange_facts *facts);

/// Gradients of a parameter set reduced over a group: parameters are gathered into buckets, and a bucket is on its way as soon as
/// backward has finished its members. Every rank sends each other rank the piece that one sums, in the wire's format; sums are f32,
/// each term divided by the number of ranks before; the sums go back in the same format. All ranks send their buckets in one order, the last
/// members of the set first. What is under way lies in memory for a few buckets; where there is no more, backward waits for messages.
typedef struct eng_parallel eng_parallel;
enum { ENG_COMM_OWN = 0, ENG_COMM_F32 = 1, ENG_COMM_BF16 = 2, ENG_COMM_F16 = 3, ENG_COMM_FP8 = 4, ENG_COMM_DTYPES = 5 };
typedef struct eng_parallel_options {
  int64_t bucket;             // bytes of gradients in a bucket, about
  int32_t comm_dtype;               // ENG_COMM_*; OWN: each gradient's own format. FP8: e4m3 in blocks of 128 with a power of two each
  int32_t zero;               // 1: this rank updates its own pieces alone (ZeRO-1), moments are kept for these only; 2: it keeps gradients of
                              // its own pieces alone, too (ZeRO-2)
  /// Parameters that not all ranks hold (experts): apart[i] is 1 for those, NULL for none. Here they have their elements, or none where others
  /// hold them; `holders` is this rank and those that hold the same ones. Their gradients are added up over the holders alone, each term
  /// divided by the number of all ranks, whose batches they are of.
  const uint8_t *apart;
  eng_comm *holders;
} eng_parallel_options;
/// One set has one at most. With `zero` the set's optimizers must be told (eng_optimizer_shard). With zero = 2 gradients are written into
/// memory that each takes when it is first written and gives back when its bucket is sent, and only between eng_parallel_begin and
/// eng_parallel_finish; of the sums the own pieces stay, which eng_parallel_stats and updates read. All else that wants gradients,
/// eng_gradient, eng_params_stats and eng_params_unscale, is an error (STATE).
eng_status eng_parallel_new(eng_parallel **out, eng_params *set, eng_comm *comm, const eng_parallel_options *options);
void eng_parallel_free(eng_parallel *parallel);
/// From now on the reduction starts by itself in the backward pass. `pass`: ENG_PASS_FIRST before the last one of a step; with zero = 2
/// before the first of a step, ENG_PASS_MORE before the others, whose sums are added up in the own pieces in the order of passes: in f32,
/// each sum and what stands there rounded to the gradient's format. ENG_PASS_ALONE: nothing is sent, and with
/// zero = 2 the gradients are forgotten. Errors: STATE.
enum { ENG_PASS_FIRST = 0, ENG_PASS_MORE = 1, ENG_PASS_ALONE = 2 };
eng_status eng_parallel_begin(eng_parallel *parallel, int pass);
/// Waits until all gradients are reduced. With `zero` those of other ranks' pieces are not touched.
eng_status eng_parallel_finish(eng_parallel *parallel);
/// Forgets a reduction that begun and was not finished because the step failed here.
void eng_parallel_cancel(eng_parallel *parallel);
/// eng_params_stats over all ranks: each looks at its own pieces, and one small message makes of it the same record everywhere. On the
/// way go n_sums numbers to be added up over ranks and n_maxima to take the largest of. `stats` has n entries, without histograms.
eng_status eng_parallel_stats(eng_record *record, eng_tensor_stats *stats, eng_parallel *parallel, double scale, unsigned needs,
                              double *sums, int n_sums, double *maxima, int n_maxima);
/// With parameters apart: what every rank brought of them becomes known to all, for eng_parallel_brought. After eng_parallel_stats.
eng_status eng_parallel_tell_brought(eng_parallel *parallel);
/// The histograms of all ranks' stats, too.
eng_status eng_parallel_histograms(eng_tensor_stats *stats, eng_parallel *parallel);
/// What rank `rank` brought to the last reduction as the gradient of parameter `index`: bits 1 a gradient, 2 inf, 4 nan, 8 numbers that the
/// wire's format made inf.
int eng_parallel_brought(const eng_parallel *parallel, int rank, int index);
/// With `zero`, after an update: everybody's pieces of the weights to everybody.
eng_status eng_parallel_gather(eng_parallel *parallel);
/// The f32 gradients of a reference backward (eng_params_reference_begin), reduced at once.
eng_status eng_parallel_reference(eng_parallel *parallel);
/// The elements [from, to) of parameter `index` that this rank keeps up to date.
void eng_parallel_own(int64_t *from, int64_t *to, const eng_parallel *parallel, int index);
/// Of the last step's reductions: messages and bytes this rank sent, seconds from the first bucket's start to the last one's end, and of
/// these seconds spent waiting in eng_parallel_finish, and before, in backward, for memory that other buckets had (`held`). Seconds of the
/// record's message, and of the weights that went round after the update, with the messages and bytes of these.
typedef struct eng_parallel_facts {
  int64_t buckets, messages, bytes;
  double seconds, waited, held, record, weights;
  int64_t weight_messages, weight_bytes;
} eng_parallel_facts;
void eng_parallel_last(eng_parallel_facts *out, const eng_parallel *parallel);
/// What rank `rank` of `size` (-1: the one that sums most) would take and send, as options say, without these ranks: bytes of memory, of messages sent in a reduction, and,
/// with zero, of updated weights sent. Exact, but that `rooms` takes the operations that stand on the tape for the step's. `apart` must be NULL.
typedef struct eng_parallel_sizes {
  int64_t buckets, messages, bytes, weight_messages, weight_bytes;
  int64_t own;                  // elements that this rank sums
  int64_t gradients, rooms;     // memory of gradients that stay; zero = 2: of those that backward writes
  int64_t under_way;            // of messages and sums
} eng_parallel_sizes;
eng_status eng_parallel_predict(eng_parallel_sizes *out, eng_params *set, int rank, int size, const eng_parallel_options *options);
/// Seconds that this process works in a reduction over `size` ranks of the gradients that stand, in packing and adding up: what is sent goes nowhere.
/// Afterwards there are no gradients.
eng_status eng_parallel_rehearse(double *seconds, eng_params *set, int size, const eng_parallel_options *options);
/// What becomes of n numbers on the wire, in place.
eng_status eng_comm_dtype_round(float *x, int64_t n, int comm_dtype);
/// What becomes of several ranks' gradients, in this process alone, by the kernels of the memory they lie in: rows of x [ranks x n], in f32, f16
/// or bf16, packed, added up, each divided by their number, and unpacked into out [n] of the same dtype; with `add` added to what stands
/// there. brought[ranks]: bits as eng_parallel_brought gives them, without 1. Errors: SHAPE, DTYPE, VALUE.
eng_status eng_comm_dtype_reduce(const eng_tensor *out, int *brought, const eng_tensor *x, int comm_dtype, bool add);

/// Keeps this optimizer's moments for the own pieces of its set alone; what they hold there stays.
eng_status eng_optimizer_shard(eng_optimizer *state);

#endif
