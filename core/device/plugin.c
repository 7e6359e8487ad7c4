// Loads the CUDA device, libengine_cuda.so in this library's folder, on first use. So the engine
// also runs on machines without a driver, and its start does not load the CUDA libraries. Called by
// backend.c and, for NVIDIA's libraries, by dist/comm_nccl.c.
#define _GNU_SOURCE
#include "plugin.h"

#include "base/error.h"
#include "base/rng.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static eng_status plugin_error(eng_status status, const char *text)
{ return error_set(status, "%s", text); }

static const backend_host host = {
  .abi = BACKEND_ABI,
  .error = plugin_error,
  .alloc = arena_alloc_in,
  .free = arena_free_in,
  .tensor_text = tensor_text,
  .tensor_contiguous = tensor_contiguous,
  .rng_seed = rng_seed,
  .interrupted = eng_interrupted,
};

/// Finds the folder of this library.
static bool own_folder(char *path, int size)
{
  Dl_info info;
  if (!dladdr((void *)plugin_error, &info) || !info.dli_fname) return false;
  char real[4096];
  snprintf(path, (size_t)size, "%s", realpath(info.dli_fname, real) ? real : info.dli_fname);
  char *slash = strrchr(path, '/');
  if (!slash) return false;
  *slash = 0;
  return true;
}

void *plugin_library(const char *name, int mode)
{
  void *library = dlopen(name, RTLD_NOW | mode);
  if (library) return library;
  const char *home = getenv("CUDA_HOME");
  char in_home[512], pattern[1024];
  snprintf(in_home, sizeof in_home, "%s/lib64", home ? home : "/usr/local/cuda");
  const char *const folders[] = {
    in_home, "/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64",
    "/usr/local/cuda*/targets/x86_64-linux/lib", "/usr/lib/python3*/dist-packages/nvidia/*/lib",
    "/opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib"};
  for (size_t i = 0; i < sizeof folders / sizeof *folders && !library; i++) {
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/%s", folders[i], name);
    if (glob(pattern, 0, NULL, &found) == 0)
      for (size_t k = 0; k < found.gl_pathc && !library; k++)
        library = dlopen(found.gl_pathv[k], RTLD_NOW | mode);
    globfree(&found);
  }
  return library;
}

/// Returns the reason why a file must not be passed to dlopen, or NULL. Opening a pipe would block,
/// and mapping a library that is truncated would crash the process.
static const char *unfit(const char *path)
{
  struct stat about;
  Elf64_Ehdr head;
  int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  bool is_file = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode), cut = false;
  if (is_file && pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head &&
      memcmp(head.e_ident, ELFMAG, SELFMAG) == 0 && head.e_ident[EI_CLASS] == ELFCLASS64) {
    uint64_t size = (uint64_t)about.st_size, sections = (uint64_t)head.e_shnum * head.e_shentsize;
    cut = head.e_shoff > size || sections > size - head.e_shoff;
    for (int i = 0; i < head.e_phnum && !cut; i++) {
      Elf64_Phdr segment;
      cut =
        pread(fd, &segment, sizeof segment, (off_t)(head.e_phoff + (uint64_t)i * sizeof segment)) !=
          (ssize_t)sizeof segment ||
        segment.p_offset > size || segment.p_filesz > size - segment.p_offset;
    }
  }
  if (fd >= 0) close(fd);
  return !is_file ? "is not a regular file" : cut ? "is truncated" : NULL;
}

static eng_status load(const backend **loaded)
{
  char folder[4096], path[4200], cards[512];
  FAIL_IF(!own_folder(folder, sizeof folder), ENG_ERR_DEVICE,
          "cuda: cannot find the folder of libengine.so, in which the CUDA plug-in should be");
  const char *other = getenv("ENGINE_CUDA_PLUGIN");   // specs name a plug-in that needs no card
  if (other && !*other) other = NULL;
  // dlopen searches for a name without a slash only in the loader's folders, so "./" is added.
  if (other) snprintf(path, sizeof path, "%s%s", strchr(other, '/') ? "" : "./", other);
  else snprintf(path, sizeof path, "%s/libengine_cuda.so", folder);
  FAIL_IF(access(path, R_OK) != 0, ENG_ERR_DEVICE,
          "cuda: cannot use the CUDA plug-in (%s %s); hint: run make with nvcc on the PATH, or use "
          "device=cpu", path, errno == ENOENT ? "is missing" : "cannot be read");
  const char *wrong = unfit(path);
  FAIL_IF(wrong, ENG_ERR_DEVICE,
          "cuda: %s %s; hint: run make, or copy the file again", path, wrong);
  FAIL_IF(!other && eng_gpu_probe(cards, sizeof cards) < 0, ENG_ERR_DEVICE,
          "cuda: this machine has no working NVIDIA driver; hint: see what nvidia-smi prints, or "
          "use device=cpu");
  if (!other) plugin_library("libcublasLt.so.13", RTLD_GLOBAL);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  FAIL_IF(!library, ENG_ERR_DEVICE, "cuda: cannot load %s: %s; hint: set CUDA_HOME to a CUDA 13 "
          "toolkit, or use device=cpu", path, dlerror());
  union { void *object; backend_plugin *function; } entry = {dlsym(library, "eng_cuda_backend")};
  eng_status status =
    error_set(ENG_ERR_DEVICE, "cuda: %s %s; hint: run make", path,
              entry.object ? "belongs to another version of the engine"
                           : "is not a device plug-in of this engine");
  if (entry.object) *loaded = entry.function(&host);   // on failure, may set an error of its own
  if (*loaded) return ENG_OK;
  dlclose(library);
  return status;
}

const backend *plugin_cuda(void)
{
  static const backend *loaded;
  if (!loaded) load(&loaded);
  return loaded;
}
