// Part of engine.h; only engine.h includes this file. Files, the attach socket of a run, histories.

// ------------------------------------------------------------------ files

/// The bytes of a file, mapped read-only. An empty file has size 0 and data NULL.
typedef struct eng_mapping { const void *data; int64_t size; } eng_mapping;
/// Maps a file. Map only files that are not rewritten in place: if the file shrinks while it is
/// mapped, reading it ends the process.
eng_status eng_file_map(eng_mapping *out, const char *path);
void       eng_file_unmap(eng_mapping *mapping);

/// Replaces a file as a whole: writes a temporary file next to it, syncs that file, then renames
/// it. A reader of `path` finds the old contents or the new ones, even after a crash. On an error
/// the old file is unchanged, unless only the final sync of the directory failed.
eng_status eng_file_write(const char *path, const void *data, int64_t size);
/// Computes the CRC-32C and the size in bytes of a file.
eng_status eng_file_checksum(uint32_t *crc, int64_t *size, const char *path);
/// Returns the CRC-32C (Castagnoli, as in iSCSI and ext4) of `size` bytes. To continue a checksum,
/// pass the checksum of the preceding bytes as `crc`; otherwise pass 0.
uint32_t   eng_crc32c(uint32_t crc, const void *data, int64_t size);

/// Returns the kind of file that `path` names, ENG_FILE_*. Follows symbolic links.
enum { ENG_FILE_NONE = 0, ENG_FILE_REGULAR = 1, ENG_FILE_FOLDER = 2, ENG_FILE_OTHER = 3 };
int        eng_file_kind(const char *path);
/// Returns a hash of the device, inode, size and times of the file at `path`, or 0 if there is no
/// file. The hash changes when the file is written or replaced.
uint64_t   eng_file_stamp(const char *path);
/// Makes a directory and its parents. No error if it exists.
eng_status eng_file_mkdir(const char *path);
/// Syncs a directory's entries to the disk.
eng_status eng_file_sync(const char *path);
/// Renames within a directory and syncs that directory. Replaces an existing file, but not a device
/// or pipe. Errors: IO.
eng_status eng_file_rename(const char *from, const char *to);
/// Exchanges two names of one directory atomically, so that both names always exist, and syncs the
/// directory. Errors: IO, also if the file system does not support this.
eng_status eng_file_exchange(const char *a, const char *b);
/// Removes a file, a symbolic link or an empty directory. No error if it does not exist. Errors:
/// STATE (a directory that is not empty), IO.
eng_status eng_file_remove(const char *path);
/// Stores the absolute path of the working directory in `out`, which has `size` bytes. Errors: IO
/// (the directory was removed, or its path is longer).
eng_status eng_file_working_folder(char *out, int64_t size);
/// Locks the file `path` against other processes until eng_file_unlock or the end of this process.
/// Creates the file if it is missing and writes this process's id into it. `lock` is -1 if the file
/// system has no locks. Errors: STATE (this or another process holds the lock; the text gives the
/// id of that process, if it is known), IO.
eng_status eng_file_lock(int *lock, const char *path);
void       eng_file_unlock(int lock);
/// The names in a directory, sorted bytewise, without "." and "..".
typedef struct eng_listing eng_listing;
eng_status  eng_file_list(eng_listing **out, const char *path);
/// Returns name `i`, counted from 0, or NULL past the end.
const char *eng_listing_name(const eng_listing *listing, int i);
void        eng_listing_free(eng_listing *listing);

/// A safetensors file opened for reading. The whole header has been checked: every entry lies
/// inside the file and has the size of its shape and dtype.
typedef struct eng_safetensors eng_safetensors;

/// One tensor in the file. `name` lives as long as the file is open. The bytes [begin, end) of the
/// file are the tensor's data.
typedef struct eng_safetensors_entry {
  const char *name;
  int32_t dtype, ndim;
  int64_t shape[6];
  int64_t begin, end;
} eng_safetensors_entry;

/// Opens a file. Errors: IO (missing, unreadable), FORMAT (a header that violates the format, or a
/// tensor of more than ENG_MAX_DIMS dimensions), DTYPE (a dtype that this engine does not support;
/// the text names it), MEMORY.
eng_status  eng_safetensors_open(eng_safetensors **out, const char *path);
/// Closes the file. NULL is allowed.
void        eng_safetensors_close(eng_safetensors *file);
int64_t     eng_safetensors_count(const eng_safetensors *file);
/// Returns entry `index`, counted from 0 in the order of the data. Errors: VALUE (no such entry).
eng_status eng_safetensors_get(eng_safetensors_entry *out, const eng_safetensors *file,
                               int64_t index);
/// Reads an entry into a new tensor. Its lifetime is ENG_KEEP if `keep`, else ENG_AUTO (eng_new).
eng_status eng_safetensors_read(eng_tensor *out, const eng_safetensors *file, int64_t index,
                                bool keep);
/// Returns the number of metadata pairs.
int64_t     eng_safetensors_metadata_count(const eng_safetensors *file);
/// Returns the key and value of metadata pair `index`, counted from 0 in file order. Errors: VALUE
/// (no such pair).
eng_status eng_safetensors_metadata(const char **key, const char **value,
                                    const eng_safetensors *file, int64_t index);

/// A safetensors file being written.
typedef struct eng_safetensors_writer eng_safetensors_writer;
eng_status eng_safetensors_begin(eng_safetensors_writer **out, const char *path);
/// Adds a tensor, which may have any strides. Tensors are written row-major, in the order of these
/// calls. eng_safetensors_commit reads the tensors, so they must live until then. Errors: STATE (a
/// weight divided among ranks), VALUE (a name that is reserved or not UTF-8).
eng_status eng_safetensors_add(eng_safetensors_writer *writer, const char *name,
                               const eng_tensor *x);
/// Adds a metadata pair. Errors: VALUE (text that is not UTF-8, or a key that occurs twice).
eng_status eng_safetensors_annotate(eng_safetensors_writer *writer, const char *key,
                                    const char *value);
/// Writes a temporary file, syncs it and renames it to the path. *crc (unless NULL) receives the
/// file's CRC-32C. Always frees the writer. On an error no temporary file remains, and the old file
/// is unchanged, unless only the final sync of the directory failed. Errors: VALUE (two tensors of
/// the same name), STALE, MEMORY, IO.
eng_status eng_safetensors_commit(eng_safetensors_writer *writer, uint32_t *crc);
/// Frees a writer that was not committed. NULL is allowed.
void       eng_safetensors_abort(eng_safetensors_writer *writer);

// ------------------------------------------------------------------ attach

/// The attach socket of a run, for other processes that run as the same user or as root: a Unix
/// socket, mode 0600, with a line-based protocol. Other users are rejected, up to 8 clients are
/// served at a time, and no client can make the run wait.
typedef struct eng_attach eng_attach;
// Limits in bytes for each client. LINE: a line that it sends, with its newline. ANSWER: all
// replies that the run keeps for it, because the socket's buffer is full.
enum { ENG_ATTACH_LINE = 65536, ENG_ATTACH_ANSWER = 1 << 20 };
/// Opens the socket at `path`. The path of its folder may have any length. A file name that is too
/// long is an error (IO). Replaces a socket on which no process listens. Errors: STATE (another
/// process listens), IO, MEMORY.
eng_status eng_attach_open(eng_attach **out, const char *path);
/// Disconnects all clients and removes the socket. NULL is allowed.
void       eng_attach_close(eng_attach *server);
/// Accepts clients, reads and writes their data, and waits up to `milliseconds` for activity. With
/// `milliseconds` = 0 and no clients, the call takes less than a microsecond. Returns true if a
/// line arrived: *line is the line without its newline, valid until the next call, and *client is
/// the number of the client that sent it.
bool eng_attach_poll(const char **line, int64_t *length, int *client, eng_attach *server,
                     int milliseconds);
/// Sends a line to a client. Disconnects a client for which more than ENG_ATTACH_ANSWER bytes would
/// have to be kept. Does nothing if the client has disconnected.
void       eng_attach_answer(eng_attach *server, int client, const char *text, int64_t size);
/// eng_attach_here returns whether a client is still connected, eng_attach_count the number of
/// clients.
bool       eng_attach_here(eng_attach *server, int client);
int        eng_attach_count(const eng_attach *server);

/// A client's connection to a run.
typedef struct eng_attach_link eng_attach_link;
/// Connects to the socket at `path`. Errors: STATE (no run listens there), IO.
eng_status eng_attach_connect(eng_attach_link **out, const char *path);
/// Sends text; waits while the socket's buffer is full. Errors: IO (the run has ended), INTERRUPTED
/// (part of the text may have been sent).
eng_status eng_attach_send(eng_attach_link *link, const char *text, int64_t size);
/// Waits for the next line, which is valid until the next call. Errors: IO (the run has ended, or
/// the line is too long), STATE (no line within `seconds`), INTERRUPTED.
eng_status eng_attach_receive(const char **line, int64_t *length, eng_attach_link *link,
                              double seconds);
void       eng_attach_leave(eng_attach_link *link);

// ------------------------------------------------------------------ history

/// A run's history: an SQLite file in WAL mode. Appending puts rows into a queue in memory; a
/// thread commits them every quarter of a second, so a killed run loses at most the rows that were
/// still queued. NaN is stored as NULL.
typedef struct eng_history eng_history;
/// The number of steps that one row of the table `blocks` summarizes.
enum { ENG_HISTORY_BLOCK = 256 };

/// Opens a history. `write` is for the run itself, and creates the file if it is missing. Without
/// `write`, the history is opened read-only; any process may do so, even while the run writes.
/// Errors: IO; FORMAT (the file is not a history, is from a newer engine, or has views, triggers,
/// virtual tables or computed columns; without `write`, it is empty); LIBRARY (no thread); MEMORY.
eng_status eng_history_open(eng_history **out, const char *path, bool write);
/// Commits queued rows and closes the history. Always frees it, except in a forked child, where it
/// does nothing. NULL is allowed. Errors: IO (rows of this run were lost, now or earlier, or the
/// file was removed or replaced).
eng_status eng_history_close(eng_history *history);
/// Does the same as eng_history_close, but reports no error and leaves the thread's error text
/// unchanged. It is for a garbage collector, which may run after a failed call and before the
/// script reads the error of that call.
void       eng_history_free(eng_history *history);

/// Returns the columns of `steps` as words NAME:MEANING. MEANING is what NULL stands for in the
/// column: a number, `false` (the column holds 0 or 1) or `nil` (a missing value).
const char *eng_history_columns(void);
/// Appends one row to `steps`. `tokens`: the number of tokens that this step trained on. This and
/// the following functions append to a queue. They return IO once if the writing thread has failed
/// (disk full). The row is still queued and is written when the disk has room again, so a run can
/// continue after the error. They also return IO once if SQLite has refused a row, which is then
/// left out, or if the file was removed or replaced. When the queue is full, a call waits for room;
/// while commits fail it drops its row instead, and an event 'history' later records how many rows
/// were dropped. Other errors: STATE (opened without `write`), VALUE (a row of more than 4 MiB).
eng_status eng_history_step(eng_history *history, const eng_record *record,
                            const eng_verdict *verdict, double tokens);
/// Appends one row to `tensor_stats`: statistics of tensors 0..n-1 in parameter order.
eng_status eng_history_tensors(eng_history *history, int64_t step, const eng_tensor_stats *stats,
                               int n);
/// Appends a shadow policy's decision to `shadows`. The decision holds until the next row with that
/// policy's name. `overflow`: gradients would overflow at the scale of this policy. `bound`: the
/// decision is a bound, not exact (lua/engine/run/counterfactual.lua).
eng_status eng_history_shadow(eng_history *history, int64_t step, const char *name,
                              const eng_verdict *verdict, bool overflow, bool bound);
/// Appends the meter of an FP8 layer's role to `fp8`. `value`, in order: snr (dB); underflow,
/// overflow and zeros (as fractions of the elements); amax, least, scale_min and scale_max (without
/// the loss scale); count; and, for the replay of policies, peak, power and asked. peak: the
/// largest magnitude of all elements, whether measured or not, or inf or nan if any element is inf
/// or nan. power: the sum of squares. asked: the amax that the policies set for the role's scale in
/// the next step; 0 if they set none, so that the measured amax counts; NaN if they cannot set it.
eng_status eng_history_fp8(eng_history *history, int64_t step, const char *site, const char *role,
                           const double value[12]);
/// Appends to the table `signals` a value that the script published as record.signals[name]. The
/// value holds until the next row of that name, so callers append only changed values.
eng_status eng_history_signal(eng_history *history, int64_t step, const char *name, double value);
/// Appends one row, with the current time, to `events`. `data` is text for programs (JSON), or
/// NULL.
eng_status eng_history_event(eng_history *history, int64_t step, const char *kind, const char *text,
                             const char *data);
/// Sets the value of a key in `table`, "meta" or "config".
eng_status eng_history_text(eng_history *history, const char *table, const char *key,
                            const char *value);
/// Stores a policy's source under its hash.
eng_status eng_history_policy(eng_history *history, const char *hash, const char *name,
                              const char *source);
/// Stores the name and shape of parameter `index`, and the format of its gradient at the run's
/// first steps ("f16"; NULL if unknown), unless the history has a format. first_bad and
/// tensor_stats use the same index.
eng_status eng_history_parameter(eng_history *history, int index, const char *name, int ndim,
                                 const int64_t *shape, const char *gradient);
/// Continues a run at `step`: deletes the rows of this and later steps, except events up to the
/// checkpoint at `step` and events 'resumed'; appends an event 'resumed'. Waits for the commit.
eng_status eng_history_resume(eng_history *history, int64_t step);
/// Waits until everything appended so far is committed. Errors: IO (a commit failed or, not yet
/// reported, a row was refused or the file was removed or replaced).
eng_status eng_history_flush(eng_history *history);

/// One read-only SQL statement on a history. Indices of parameters and columns count from 0.
typedef struct eng_query eng_query;
/// Prepares a statement. It reads all rows that were appended before this call, except rows that
/// could not be committed. Errors: VALUE (an SQL error, no or several statements, or a statement
/// that does more than read, such as BEGIN or ATTACH), IO, FORMAT, MEMORY.
eng_status  eng_query_open(eng_query **out, eng_history *history, const char *sql);
void        eng_query_close(eng_query *query);
int         eng_query_parameters(const eng_query *query);
eng_status  eng_query_bind_int(eng_query *query, int parameter, int64_t value);
eng_status  eng_query_bind_double(eng_query *query, int parameter, double value);
eng_status  eng_query_bind_text(eng_query *query, int parameter, const char *value, int64_t bytes);
/// Goes to the next row; *row is false if there is none. Errors: FORMAT (the file is damaged, a
/// value does not fit its column, a step is negative, or the query does more work than a limit that
/// grows with the file's size), INTERRUPTED, IO.
eng_status  eng_query_next(bool *row, eng_query *query);
int         eng_query_columns(const eng_query *query);
const char *eng_query_name(const eng_query *query, int column);
/// The type of a column in this row: ENG_COLUMN_*, numbered as SQLite numbers them.
enum {
  ENG_COLUMN_INTEGER = 1, ENG_COLUMN_REAL = 2, ENG_COLUMN_TEXT = 3, ENG_COLUMN_BLOB = 4,
  ENG_COLUMN_NULL = 5
};
int         eng_query_type(const eng_query *query, int column);
int64_t     eng_query_int(const eng_query *query, int column);
double      eng_query_double(const eng_query *query, int column);
/// Returns the text or blob in a column, valid until the next row, and its size in bytes; NULL if
/// it is empty.
const void *eng_query_bytes(int64_t *size, const eng_query *query, int column);

/// Unpacks a blob of the table tensor_stats or of the column steps.hist. *n receives the number of
/// tensors in the blob. A blob of steps.hist describes one tensor, by its histogram and by amax,
/// which holds eng_record.amax_f16. Fills at most `capacity` entries of `stats`. Errors: FORMAT.
eng_status eng_history_unpack(int *n, eng_tensor_stats *stats, int capacity, const void *blob,
                              int64_t size);
