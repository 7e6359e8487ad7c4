// Files that are whole or not there: written beside, synced, renamed into place, with their CRC-32C
// taken on the way. Called by safetensors.c; the rest of file.c is declared in engine.h.
#ifndef ENG_FILE_H
#define ENG_FILE_H

#include "engine.h"

typedef struct file_writer {
  char    *path;         // where the file will stand
  char    *temporary;    // where it is written, in the same directory
  int      fd;           // -1: no file open
  uint32_t crc;          // CRC-32C of what was put
  int64_t  size;         // bytes put
} file_writer;

/// Begins a file. On any error of these functions the temporary file is gone and `path` untouched.
eng_status file_writer_open(file_writer *writer, const char *path);
eng_status file_writer_put(file_writer *writer, const void *data, int64_t size);
/// Syncs, renames, syncs the directory.
eng_status file_writer_commit(file_writer *writer);
/// Removes the temporary file. Fine after an error or a commit.
void       file_writer_abort(file_writer *writer);

/// Reads exactly `size` bytes at `offset`; a shorter file is an IO error that names `path`.
eng_status file_read_at(int fd, const char *path, void *target, int64_t size, int64_t offset);

#endif
