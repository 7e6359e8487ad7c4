// Part of engine.h; only engine.h includes this file. Several processes on one job: groups and
// collective operations, reduction of gradients, exchange of experts' rows, prediction of costs.

/// Several processes ("ranks") on one job, started by mpirun, srun or the like. A group holds some
/// of them, numbered from 0; the world holds all. Every rank of a group calls the same operations
/// in the same order. Pointers are to host memory.
typedef struct eng_comm eng_comm;
enum { ENG_SUM = 0, ENG_MAX = 1 };

/// Returns whether the environment says that this process was started as one of several. Sets *rank
/// to its rank and *size to the number of processes. For a process that runs alone, *rank is 0 and
/// *size is 1. Starts nothing. Also returns true if the variables are malformed, so that the caller
/// goes on to eng_comm_world, which reports them.
bool eng_comm_launched(int *rank, int *size);
/// Returns the world, the group of all ranks. The first call loads the transport if this process
/// was started as one of several. The transport is MPI if the launcher is mpirun, or srun with an
/// MPI plug-in. It is NCCL alone if the launcher is torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT), or srun without an MPI plug-in (SLURM_PROCID, MASTER_ADDR). ENGINE_RANKS=off loads
/// no transport; ENGINE_RANKS=mpi and ENGINE_RANKS=nccl load MPI or NCCL, even for one process. A
/// process that runs alone is a world of one.
/// Errors: LIBRARY (this build has no MPI, its MPI does not see the other ranks, or NCCL is
/// missing), DEVICE (NCCL without a card), VALUE (a malformed environment variable).
eng_status eng_comm_world(eng_comm **out);
int eng_comm_rank(const eng_comm *comm);
int eng_comm_size(const eng_comm *comm);
/// Returns the number of threads for each rank on this machine: the machine's cores divided by its
/// ranks.
int eng_comm_threads(void);
/// Describes the transport: "Open MPI v4.1.4, 4 ranks, 4 of them here". After eng_parallel_new for
/// gradients on cards, the text also says whether messages go from card to card over NCCL or
/// through the host, and why.
const char *eng_comm_text(void);
/// Returns the version and path of the NCCL library that would be used: "2.28.9,
/// /usr/local/cuda/lib64/libnccl.so.2". Errors: LIBRARY; the text says what is missing.
eng_status eng_comm_nccl(const char **text);
/// Splits a group: the ranks that pass the same color form a new group, ordered by key, then rank.
/// A rank that passes color -1 joins no group; *out is NULL. Errors: VALUE (a color below -1).
eng_status eng_comm_split(eng_comm **out, eng_comm *parent, int color, int key);
/// Frees a group. NULL and the world are allowed.
void eng_comm_free(eng_comm *comm);
/// Sets how long a rank waits for others (300 s by default) before it ends the job with a message
/// that names the missing ranks. 0 only queries. Returns the previous value.
double eng_comm_timeout(double seconds);
/// Ends this process's part in the job. This is the last call of a process, and is made
/// automatically when the process exits. Code 0 waits for the other ranks, unless an exchange was
/// abandoned after an error; any other code ends the other ranks as well. Does nothing in a process
/// that runs alone.
void eng_comm_end(int code);

/// Waits until every rank of the group has called this function.
eng_status eng_comm_barrier(eng_comm *comm);
/// Copies `bytes` of host memory from rank `root` to all ranks of the group. Errors: VALUE (no such
/// rank).
eng_status eng_comm_broadcast(eng_comm *comm, void *data, int64_t bytes, int root);
/// Copies the values of a contiguous tensor in any memory from rank `root` to all ranks. Errors:
/// SHAPE (not contiguous), VALUE (no such rank).
eng_status eng_comm_broadcast_tensor(eng_comm *comm, const eng_tensor *x, int root);
/// Gathers `bytes` from every rank, in order of ranks, into `all` [size x bytes]. Errors: VALUE
/// (more than 1 GiB).
eng_status eng_comm_all_gather(eng_comm *comm, void *all, const void *own, int64_t bytes);
/// Reduces `data` over the ranks, in place. `dtype` is f32, f64 or i64. `op` is ENG_SUM or ENG_MAX,
/// where NaN exceeds every number. Sums have one fixed order (core/dist/comm.h): the same numbers
/// give the same sum, bit for bit, on every rank and in every run. Errors: DTYPE, VALUE (an unknown
/// `op`, or more than 1 GiB for each rank to sum).
eng_status eng_comm_all_reduce(eng_comm *comm, void *data, int64_t count, int dtype, int op);

/// An all-to-all of rows: sends rows of `from` [n x C] to the ranks of a group and receives their
/// rows into `to` [m x C]. Both tensors have the same dtype and lie in the same memory space. The
/// first send[0] rows go to rank 0, the next send[1] rows to rank 1, and so on. `to` receives
/// receive[0] rows from rank 0, then receive[1] rows from rank 1, and so on. Messages are in
/// `comm_dtype` (below); FP8 uses blocks along a row and turns inf into nan. Rows that stay on this
/// rank are rounded in the same way. Adds to `facts` (may be NULL) the bytes sent to other ranks
/// and, over finite numbers, the sums of squares of the sent numbers (`signal`) and of their
/// rounding errors (`error`). Tensors in host memory that already have the comm dtype are not
/// rounded and leave `signal` and `error` unchanged. Errors: SHAPE, VALUE.
typedef struct eng_exchange_facts { int64_t bytes; double signal, error; } eng_exchange_facts;
eng_status eng_comm_exchange_rows(const eng_tensor *to, const eng_tensor *from, eng_comm *comm,
                                  const int64_t *send, const int64_t *receive, int comm_dtype,
                                  eng_exchange_facts *facts);

/// Reduces the gradients of a parameter set over a group. Parameters are assigned to buckets. A
/// bucket is sent as soon as backward has completed the gradients in it and all earlier buckets
/// have been sent. Every rank sums one piece of each bucket: it receives this piece from the other
/// ranks in the comm dtype, divides every term by the number of ranks, adds in f32, and rounds the
/// sums to the comm dtype. Without `zero` the sums are sent back. All ranks send their buckets in
/// the same order, beginning with the last parameters of the set. The memory for messages holds a
/// few buckets; when it is full, backward waits for messages.
typedef struct eng_parallel eng_parallel;
/// The comm dtype: the format of messages. OWN: each gradient's own dtype. FP8: e4m3 in blocks of
/// 128, each with a power-of-two scale.
enum {
  ENG_COMM_OWN = 0, ENG_COMM_F32 = 1, ENG_COMM_BF16 = 2, ENG_COMM_F16 = 3, ENG_COMM_FP8 = 4,
  ENG_COMM_DTYPES = 5
};
typedef struct eng_parallel_options {
  int64_t bucket;             // bytes of gradients in a bucket, approximately
  int32_t comm_dtype;         // ENG_COMM_*
  int32_t zero;               // 0: off. Otherwise this rank updates only its own pieces. ZeRO-1, 2
                              // and 3 differ in what the rank stores for its own pieces alone:
                              // 1: moments; 2: also gradients; 3: also weights (see `units`)
  int32_t whole;              // 1: pieces are whole parameters, for optimizers that need matrices
  /// apart[i] is 1 if parameter i belongs to an expert, which only some ranks hold. NULL: there are
  /// no experts. On a rank that does not hold the expert, the parameter has no elements.
  /// `holders`: this rank and the other ranks that hold the same experts. Gradients of experts are
  /// summed over the holders alone. Each term is divided by the number of all ranks, because every
  /// rank's batch contributes to it.
  const uint8_t *apart;
  eng_comm *holders;
  /// With zero = 3: units[i], from 0 to the number of parameters - 1, is the unit of parameter i.
  /// Parameters with the same unit are used together, such as the parameters of a transformer
  /// block. A rank receives and drops the weights of a unit together.
  const int32_t *units;
} eng_parallel_options;
/// Creates an eng_parallel for a set. A set can have only one. With `zero` the set's optimizers
/// must be divided as well (eng_optimizer_shard). With zero >= 2, gradients can be written only
/// between eng_parallel_begin and eng_parallel_finish. A gradient's memory is allocated when it is
/// first written and freed when its bucket is sent. Only this rank's pieces of the sums are stored.
/// eng_parallel_stats and updates read these pieces. eng_gradient, eng_params_stats and
/// eng_params_unscale fail with STATE. Errors: VALUE (also a message above 1 GiB); STATE (the set
/// has one already, or a reference backward pass is running); DEVICE (zero = 3 with weights on a
/// card).
eng_status eng_parallel_new(eng_parallel **out, eng_params *set, eng_comm *comm,
                            const eng_parallel_options *options);
void eng_parallel_free(eng_parallel *parallel);
/// Arms the reduction, which then starts by itself during the backward pass. With zero < 2, call
/// this only before the last backward pass of a step, with pass = ENG_PASS_FIRST. With zero >= 2,
/// call this before every pass, with ENG_PASS_FIRST for the first pass of a step and ENG_PASS_MORE
/// for the other passes. The sums of later passes are added to this rank's pieces in order, in f32,
/// and each result is rounded to the gradient's dtype. ENG_PASS_ALONE: nothing is sent, and with
/// zero >= 2 the gradients of this pass are dropped. Errors: STATE.
enum { ENG_PASS_FIRST = 0, ENG_PASS_MORE = 1, ENG_PASS_ALONE = 2 };
eng_status eng_parallel_begin(eng_parallel *parallel, int pass);
/// Waits until all gradients are reduced. The gradients of other ranks' pieces are unchanged with
/// zero = 1, and not stored with zero >= 2. After ENG_PASS_ALONE, reduces nothing. Errors: STATE
/// (eng_parallel_begin was not called).
eng_status eng_parallel_finish(eng_parallel *parallel);
/// Cancels an unfinished reduction, after the step failed on this rank.
void eng_parallel_cancel(eng_parallel *parallel);
/// Computes eng_params_stats over all ranks: each rank reads its own pieces, and one small
/// allreduce gives every rank the same record. The same allreduce adds up each element of sums
/// [n_sums] over the ranks, and finds the maximum of each element of maxima [n_maxima]. The results
/// replace the elements. `stats` has an entry for each parameter. The histogram of an entry covers
/// only this rank's pieces until eng_parallel_histograms sums it.
eng_status eng_parallel_stats(eng_record *record, eng_tensor_stats *stats, eng_parallel *parallel,
                              double scale, unsigned needs, double *sums, int n_sums,
                              double *maxima, int n_maxima);
/// Gathers the flags of all ranks on every rank, so that eng_parallel_flags also knows them for the
/// parameters in `apart`. Call this after eng_parallel_stats.
eng_status eng_parallel_gather_flags(eng_parallel *parallel);
/// Sums every tensor's histogram over all ranks.
eng_status eng_parallel_histograms(eng_tensor_stats *stats, eng_parallel *parallel);
/// Returns the flags of the gradient that rank `rank` contributed to the last reduction for
/// parameter `index`. 1: the rank had a gradient; 2: it contained inf; 4: it contained nan; 8: it
/// contained finite numbers that became inf in the comm dtype.
int eng_parallel_flags(const eng_parallel *parallel, int rank, int index);
/// Distributes every rank's pieces of the weights to all ranks, after an update with `zero`. With
/// zero = 3 it distributes only the weights in `apart`; of the other weights, this rank keeps only
/// its own pieces.
eng_status eng_parallel_gather(eng_parallel *parallel);
/// With zero = 3 all weights are on every rank at first. eng_parallel_leave drops the pieces of
/// other ranks. From then on, an operation that reads a weight of which this rank lacks pieces
/// first drops all units that it does not read, and receives the weight's unit from the other
/// ranks, which must run the same operation. It then starts to receive the unit that came next in
/// earlier passes.
/// Functions other than operations fail with STATE if they read a divided weight.
/// eng_parallel_whole fetches all weights; until the next eng_parallel_leave they can be read, and
/// written with the same values on all ranks. Every rank calls both functions, between two steps.
eng_status eng_parallel_leave(eng_parallel *parallel);
eng_status eng_parallel_whole(eng_parallel *parallel);
/// With zero = 3: returns a checksum of the order in which this rank received units. The checksum
/// must be the same on all ranks.
uint32_t eng_parallel_order(const eng_parallel *parallel);
/// With zero = 3: returns a one-dimensional tensor, in the format of the master weights, of this
/// rank's elements of parameter `index`. The tensor uses the weights' own memory and lives as long
/// as the parameters. After writing to it, call eng_params_refresh. Errors: VALUE, STATE.
eng_status eng_parallel_piece(eng_tensor *out, eng_parallel *parallel, int index);
/// Reduces the f32 gradients of a reference backward pass (eng_params_reference_begin) and waits
/// for the result.
eng_status eng_parallel_reference(eng_parallel *parallel);
/// Returns the range of elements [from, to) of parameter `index` that this rank updates.
void eng_parallel_own(int64_t *from, int64_t *to, const eng_parallel *parallel, int index);
/// Measurements of the last step's reductions. messages, bytes: sent by this rank. seconds: from
/// the start of the first bucket to the end of the last one. waited: seconds spent waiting in
/// eng_parallel_finish. held: seconds for which backward waited for memory that other buckets used.
/// record: seconds of the allreduce in eng_parallel_stats. weights: seconds spent distributing
/// updated weights or, with zero = 3, starting to receive weights and waiting for them.
/// weight_messages, weight_bytes: the messages and bytes of weights that this rank sent. The other
/// fields are for zero = 3. weights_memory: the most bytes of weights and low-precision weights
/// that this rank had at one time since eng_parallel_leave. weight_exchanges: the number of times
/// that a unit was received. weights_ahead: how many of these transfers began before the operation
/// that used the unit.
typedef struct eng_parallel_facts {
  int64_t buckets, messages, bytes;
  double seconds, waited, held, record, weights;
  int64_t weight_messages, weight_bytes, weights_memory, weight_exchanges, weights_ahead;
} eng_parallel_facts;
void eng_parallel_last(eng_parallel_facts *out, const eng_parallel *parallel);
/// Predicts, without starting ranks, what rank `rank` of `size` would store, and what it would send
/// in a reduction and, with zero, to distribute updated weights. `rank` -1 stands for the rank that
/// sums the most. `rooms` and, with zero = 3, the figures of weights are exact only if the tape
/// holds exactly the operations of one step. All other figures are exact if every parameter gets a
/// gradient and messages are in host memory; messages between cards differ in `bytes` and
/// `under_way`. options->apart must be NULL.
typedef struct eng_parallel_sizes {
  int64_t buckets, messages, bytes, weight_messages, weight_bytes;
  int64_t own;                  // elements that this rank sums
  // gradients: bytes of the stored gradients. rooms: with zero >= 2, bytes of memory to allocate
  // for the gradients that backward has written and not sent yet
  int64_t gradients, rooms;
  int64_t under_way;            // bytes of memory for messages in flight and their sums
  int64_t weights;              // with zero = 3, bytes of weights and low-precision weights
  int64_t weight_exchanges;     // with zero = 3, how many times a step receives a unit
} eng_parallel_sizes;
eng_status eng_parallel_predict(eng_parallel_sizes *out, eng_params *set, int rank, int size,
                                const eng_parallel_options *options);
/// Measures, as the shortest of three tries, the seconds that this process spends packing and
/// summing in a reduction of the current gradients over `size` ranks; nothing is sent. Clears the
/// gradients.
eng_status eng_parallel_rehearse(double *seconds, eng_params *set, int size,
                                 const eng_parallel_options *options);
/// Rounds n numbers to a comm dtype and back, in place. Errors: VALUE (also for ENG_COMM_OWN).
eng_status eng_comm_dtype_round(float *x, int64_t n, int comm_dtype);
/// Reduces the gradients of several ranks within this process, with the kernels of the device that
/// owns x. The rows of x [ranks x n], in f32, f16 or bf16, are packed, divided by the number of
/// ranks, summed, and unpacked into out [n] of the same dtype; with `add`, the result is added to
/// `out`. flags[ranks]: the bits of eng_parallel_flags except 1. Errors: SHAPE, DTYPE, VALUE,
/// DEVICE.
eng_status eng_comm_dtype_reduce(const eng_tensor *out, int *flags, const eng_tensor *x,
                                 int comm_dtype, bool add);

/// Restricts this optimizer's moments, and compensations if it has any, to this rank's pieces of
/// the parameter set, whose values do not change. eng_parallel_new with `zero` comes first. A
/// second call has no effect. Errors: STATE (the set is not divided among ranks), MEMORY.
eng_status eng_optimizer_shard(eng_optimizer *state);
