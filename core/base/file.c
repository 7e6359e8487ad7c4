// Files and directories: read-only maps, atomic writes, listings, checksums. See file.h and the
// section "files" of engine_files.h. Called by store/, main/main.c and Lua.
#define _GNU_SOURCE   // renameat2
#include "file.h"

#include "error.h"
#include "scope.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>   // flock
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCK = 1 << 20 };   // bytes read at a time for a checksum

static eng_status io_error(const char *what, const char *path)
{
  int code = errno;
  const char *hint = code == ENOSPC || code == EDQUOT
                       ? "; hint: free some space"
                     : code == EFBIG
                       ? "; hint: raise the limit on file sizes (ulimit -f)"
                     : code == EACCES || code == EPERM || code == EROFS
                       ? "; hint: check the permissions"
                       : "";
  return error_set(ENG_ERR_IO, "%s: cannot %s: %s%s", path, what, strerror(code), hint);
}

char *file_parent(const char *path)
{
  const char *slash = strrchr(path, '/');
  if (slash == NULL) return strdup(".");
  return strndup(path, slash == path ? 1 : (size_t)(slash - path));
}

static eng_status sync_parent(const char *path)
{
  FREED char *parent = file_parent(path);
  FAIL_IF(parent == NULL, ENG_ERR_MEMORY, "%s: out of memory", path);
  return eng_file_sync(parent);
}

// ---- maps

eng_status file_open(int *out, int64_t *size, const char *path)
{
  struct stat now;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);     // opening a pipe does not block
  *out = -1;
  if (fd < 0) return io_error("open", path);
  eng_status status = ENG_OK;
  if (fstat(fd, &now) != 0) status = io_error("read the type and size of this file", path);
  else if (!S_ISREG(now.st_mode))
    status = error_set(ENG_ERR_IO, "%s: expected a file, got a %s", path,
                       S_ISDIR(now.st_mode) ? "directory" : "device or pipe");
  if (status != ENG_OK) {
    close(fd);
    return status;
  }
  *out = fd;
  *size = now.st_size;
  return ENG_OK;
}

eng_status eng_file_map(eng_mapping *out, const char *path)
{
  int fd;
  int64_t size;
  *out = (eng_mapping){ NULL, 0 };
  ENG_TRY(file_open(&fd, &size, path));
  void *data = size > 0 ? mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0) : NULL;
  eng_status status = data == MAP_FAILED ? io_error("map this file into memory", path) : ENG_OK;
  if (status == ENG_OK) *out = (eng_mapping){ data, size };
  close(fd);
  return status;
}

void eng_file_unmap(eng_mapping *mapping)
{
  if (mapping->data != NULL) munmap((void *)(uintptr_t)mapping->data, (size_t)mapping->size);
  *mapping = (eng_mapping){ NULL, 0 };
}

// ---- atomic writes

eng_status file_writer_open(file_writer *writer, const char *path)
{
  static unsigned serial;
  *writer = (file_writer){ .fd = -1 };
  // The kind of file is checked first, because the rename would silently replace a device such as
  // /dev/null.
  int kind = eng_file_kind(path);
  FAIL_IF(kind == ENG_FILE_FOLDER || kind == ENG_FILE_OTHER, ENG_ERR_IO, "%s: expected a file to "
          "write, got a %s", path, kind == ENG_FILE_FOLDER ? "directory" : "device or pipe");
  size_t room = strlen(path) + 48;
  writer->path = strdup(path);
  writer->temporary = malloc(room);
  FAIL_IF(!writer->path || !writer->temporary, ENG_ERR_MEMORY, "%s: out of memory", path);
  for (int attempt = 0; attempt < 100 && writer->fd < 0; attempt++) {
    snprintf(writer->temporary, room, "%s.tmp-%ld-%u", path, (long)getpid(), serial++);
    writer->fd = open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (writer->fd < 0 && errno != EEXIST) break;
  }
  if (writer->fd >= 0) return ENG_OK;
  return io_error("create a temporary file in the same directory", path);
}

eng_status file_writer_put(file_writer *writer, const void *data, int64_t size)
{
  const char *p = data;
  writer->crc = eng_crc32c(writer->crc, data, size);
  while (size > 0) {
    ssize_t wrote = write(writer->fd, p, size < (1 << 30) ? (size_t)size : (size_t)1 << 30);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      if (wrote == 0) errno = ENOSPC;
      return io_error("write the new contents (an existing file is unchanged)", writer->path);
    }
    p += wrote;
    size -= wrote;
  }
  return ENG_OK;
}

eng_status file_writer_commit(file_writer *writer)
{
  if (fsync(writer->fd) != 0)
    return io_error("flush the new file to disk (an existing file is unchanged)", writer->path);
  int closed = close(writer->fd);
  writer->fd = -1;
  if (closed == 0 && rename(writer->temporary, writer->path) == 0)
    return sync_parent(writer->path);
  eng_status status =
    io_error(closed != 0 ? "write the new contents (an existing file is unchanged)"
                         : "move the new file into place (an existing file is unchanged)",
             writer->path);
  unlink(writer->temporary);
  return status;
}

void file_writer_close(file_writer *writer)
{
  if (writer->fd >= 0) {
    close(writer->fd);
    unlink(writer->temporary);
  }
  free(writer->temporary);
  free(writer->path);
}

eng_status eng_file_write(const char *path, const void *data, int64_t size)
{
  AT_END(file_writer_close) file_writer writer;
  ENG_TRY(file_writer_open(&writer, path));
  ENG_TRY(file_writer_put(&writer, data, size));
  return file_writer_commit(&writer);
}

// ---- reading

eng_status file_read_at(int fd, const char *path, void *target, int64_t size, int64_t offset)
{
  char *p = target;
  while (size > 0) {
    ssize_t got = pread(fd, p, size < (1 << 30) ? (size_t)size : (size_t)1 << 30, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error("read", path);
    FAIL_IF(got == 0, ENG_ERR_IO, "%s: expected %lld more bytes at byte %lld, but the file ends "
            "before them; another program may have truncated the file while the engine read it",
            path, (long long)size, (long long)offset);
    p += got;
    offset += got;
    size -= got;
  }
  return ENG_OK;
}

eng_status eng_file_checksum(uint32_t *crc, int64_t *size, const char *path)
{
  int fd;
  *crc = 0;
  *size = 0;
  ENG_TRY(file_open(&fd, size, path));
  *size = 0;   // now counts the bytes that are read, because the file may be growing
  FREED char *block = malloc(BLOCK);
  eng_status status = block == NULL ? error_set(ENG_ERR_MEMORY, "%s: out of memory", path) : ENG_OK;
  while (status == ENG_OK) {
    ssize_t got = read(fd, block, BLOCK);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) status = io_error("read", path);
    if (got <= 0) break;
    *crc = eng_crc32c(*crc, block, got);
    *size += got;
  }
  close(fd);
  return status;
}

// ---- locks

eng_status eng_file_lock(int *lock, const char *path)
{
  *lock = -1;
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return io_error("open", path);
  char holder[32] = "";
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    bool taken = errno == EWOULDBLOCK;
    if (taken && pread(fd, holder, sizeof holder - 1, 0) < 0) holder[0] = 0;
    close(fd);
    if (!taken) return ENG_OK;   // the file system has no locks
    long process = strtol(holder, NULL, 10);
    FAIL_IF(process == (long)getpid(), ENG_ERR_STATE, "%s is already locked by this process", path);
    if (process <= 0)              // the other process has not written its id yet, or could not
      return error_set(ENG_ERR_STATE, "%s is locked by an unknown process", path);
    return error_set(ENG_ERR_STATE, "%s is locked by process %ld", path, process);
  }
  int length = snprintf(holder, sizeof holder, "%ld\n", (long)getpid());
  if (ftruncate(fd, 0) != 0 ||
      pwrite(fd, holder, (size_t)length, 0) != length) { /* harmless: the id is only informative */
  }
  *lock = fd;
  return ENG_OK;
}

void eng_file_unlock(int lock) { if (lock >= 0) close(lock); }

// ---- names and directories

int eng_file_kind(const char *path)
{
  struct stat stat_now;
  if (stat(path, &stat_now) != 0) return ENG_FILE_NONE;
  return S_ISREG(stat_now.st_mode) ? ENG_FILE_REGULAR
       : S_ISDIR(stat_now.st_mode) ? ENG_FILE_FOLDER : ENG_FILE_OTHER;
}

uint64_t eng_file_stamp(const char *path)
{
  struct stat now;
  if (stat(path, &now) != 0) return 0;
  const uint64_t parts[] = {(uint64_t)now.st_dev,          (uint64_t)now.st_ino,
                            (uint64_t)now.st_size,         (uint64_t)now.st_mtim.tv_sec,
                            (uint64_t)now.st_mtim.tv_nsec, (uint64_t)now.st_ctim.tv_sec,
                            (uint64_t)now.st_ctim.tv_nsec};
  uint64_t hash = eng_hash64(parts, sizeof parts);
  return hash ? hash : 1;
}

eng_status eng_file_mkdir(const char *path)
{
  FAIL_IF(!*path, ENG_ERR_IO, "expected the path of a directory, got an empty text");
  if (eng_file_kind(path) == ENG_FILE_FOLDER) return ENG_OK;
  FREED char *partial = strdup(path);
  FAIL_IF(partial == NULL, ENG_ERR_MEMORY, "%s: out of memory", path);
  size_t length = strlen(partial);
  while (length > 1 && partial[length - 1] == '/') partial[--length] = 0;
  for (size_t i = 1; i <= length; i++) {
    if (partial[i] != '/' && partial[i] != 0) continue;
    char kept = partial[i];
    partial[i] = 0;
    if (mkdir(partial, 0777) == 0) ENG_TRY(sync_parent(partial));
    else if (errno != EEXIST || eng_file_kind(partial) != ENG_FILE_FOLDER)
      return io_error("make the directory", partial);
    partial[i] = kept;
  }
  return ENG_OK;
}

eng_status eng_file_sync(const char *path)
{
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return io_error("open", path);
  // Some file systems cannot sync a directory and return EINVAL, which is ignored.
  eng_status status = ENG_OK;
  if (fsync(fd) != 0 && errno != EINVAL) status = io_error("flush to disk", path);
  close(fd);
  return status;
}

eng_status eng_file_rename(const char *from, const char *to)
{
  FAIL_IF(eng_file_kind(to) == ENG_FILE_OTHER, ENG_ERR_IO,
          "%s: expected a file to write, got a device or pipe", to);
  FAIL_IF(rename(from, to) != 0, ENG_ERR_IO,
          "%s: cannot rename to %s: %s", from, to, strerror(errno));
  return sync_parent(to);
}

eng_status eng_file_exchange(const char *a, const char *b)
{
  FAIL_IF(renameat2(AT_FDCWD, a, AT_FDCWD, b, RENAME_EXCHANGE) != 0, ENG_ERR_IO,
          "%s: cannot exchange this directory or file with %s: %s", a, b, strerror(errno));
  return sync_parent(b);
}

eng_status eng_file_remove(const char *path)
{
  if (remove(path) == 0 || errno == ENOENT) return ENG_OK;
  FAIL_IF(errno == ENOTEMPTY || errno == EEXIST, ENG_ERR_STATE,
          "%s: cannot remove: the directory is not empty", path);
  return io_error("remove", path);
}

eng_status eng_file_working_folder(char *out, int64_t size)
{ return getcwd(out, (size_t)size) != NULL ? ENG_OK : io_error("find the path", "."); }

struct eng_listing {
  struct dirent **entries;
  int             count;
};

static int is_listed(const struct dirent *entry)
{ return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0; }

static int by_bytes(const struct dirent **a, const struct dirent **b)
{ return strcmp((*a)->d_name, (*b)->d_name); }

eng_status eng_file_list(eng_listing **out, const char *path)
{
  *out = calloc(1, sizeof **out);
  FAIL_IF(*out == NULL, ENG_ERR_MEMORY, "%s: out of memory", path);
  (*out)->count = scandir(path, &(*out)->entries, is_listed, by_bytes);
  if ((*out)->count >= 0) return ENG_OK;
  eng_status status = io_error("list this directory", path);
  free(*out);
  *out = NULL;
  return status;
}

const char *eng_listing_name(const eng_listing *listing, int i)
{ return i >= 0 && i < listing->count ? listing->entries[i]->d_name : NULL; }

void eng_listing_free(eng_listing *listing)
{
  if (listing == NULL) return;
  for (int i = 0; i < listing->count; i++) free(listing->entries[i]);
  free(listing->entries);
  free(listing);
}
