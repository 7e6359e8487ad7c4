// Atomic files: each is written next to its final path, synced, and renamed into place; its CRC-32C
// is computed during the write. Called by safetensors.c and attach.c; the rest of file.c is
// declared in engine_files.h.
#pragma once

#include "engine.h"

typedef struct file_writer {
  char    *path;         // the final path
  char    *temporary;    // the file being written, in the same directory
  int      fd;           // -1: no file is open
  uint32_t crc;          // CRC-32C of the bytes written
} file_writer;

/// Begins a file, to which file_writer_put appends. The caller calls file_writer_close after any
/// result. If one of these functions fails, `path` is unchanged, unless only the final sync of the
/// directory failed.
eng_status file_writer_open(file_writer *writer, const char *path);
eng_status file_writer_put(file_writer *writer, const void *data, int64_t size);
/// Syncs the file, renames it and syncs the directory.
eng_status file_writer_commit(file_writer *writer);
/// Frees the writer. Without a commit, removes the temporary file.
void       file_writer_close(file_writer *writer);

/// Returns the directory part of a path in new memory ("." if the path has none), or NULL if there
/// is no memory.
char *file_parent(const char *path);

/// Opens a regular file for reading; `size` receives its length in bytes. Errors: IO, also for a
/// directory, a device or a pipe. The caller closes *fd.
eng_status file_open(int *fd, int64_t *size, const char *path);

/// Reads exactly `size` bytes at `offset`. A shorter file is an IO error that names `path`.
eng_status file_read_at(int fd, const char *path, void *target, int64_t size, int64_t offset);
