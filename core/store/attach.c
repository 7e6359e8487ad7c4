// The attach socket of a run: a Unix socket in the run's directory, over which other processes of
// the same user or of root exchange lines with the run. The run never waits for a client: it keeps
// unread replies up to a limit, and then disconnects the client. Lua defines the protocol
// (lua/engine/run/control.lua, lua/engine/cli/attach.lua). This file has both the server and the
// client side. Called by Lua: the trainer between steps, and `engine attach`.
#define _GNU_SOURCE   // accept4, struct ucred
#include "base/array.h"
#include "base/error.h"
#include "base/file.h"
#include "base/scope.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { CLIENTS = 8, CHUNK = 4096 };

/// Bytes in a buffer; `from` is the first byte not yet consumed.
typedef struct bytes { char *data; int64_t from, size, room; } bytes;

typedef struct client {
  int   fd;                  // -1: disconnected. The slot is free once no complete line is left
  int   number;              // identifies the client; never reused
  bytes in, out;
} client;

struct eng_attach {
  int    fd, folder;         // descriptors of the socket and of its directory
  dev_t  device;             // device and inode of the socket's file, so that closing removes no
                             // other file
  ino_t  inode;
  int    count, last_number, turn;   // turn: index of the client to check first
  char  *name;               // the name of the socket in the folder
  client clients[CLIENTS];
};

// ---- bytes

static bool bytes_add(bytes *b, const char *data, int64_t size, int64_t limit)
{
  if (b->from > 0) {
    memmove(b->data, b->data + b->from, (size_t)(b->size - b->from));
    b->size -= b->from;
    b->from = 0;
  }
  if (b->size + size > limit || !ARRAY_GROW(b->data, b->room, b->size + size)) return false;
  memcpy(b->data + b->size, data, (size_t)size);
  b->size += size;
  return true;
}

/// Returns the end of the first complete line, or NULL if there is none.
static char *line_end(const bytes *b)
{ return b->size > b->from ? memchr(b->data + b->from, '\n', (size_t)(b->size - b->from)) : NULL; }

/// Consumes the first complete line and returns it without its newline, or returns NULL if there is
/// none. The line is valid until more bytes are added.
static const char *bytes_line(bytes *b, int64_t *length)
{
  char *end = line_end(b), *line = b->data + b->from;
  if (!end) return NULL;
  *end = 0;
  *length = end - line;
  b->from += *length + 1;
  return line;
}

static void bytes_free(bytes *b)
{
  free(b->data);
  *b = (bytes){0};
}

// ---- addresses

/// Builds the address of the socket `path`, which is `name` in the open directory `folder`. An
/// address has room for 107 bytes, so a longer path is replaced by /proc/self/fd/FOLDER/NAME.
static eng_status address_of(struct sockaddr_un *out, const char *path, int folder,
                             const char *name)
{
  *out = (struct sockaddr_un){.sun_family = AF_UNIX};
  if (strlen(path) < sizeof out->sun_path) {
    memcpy(out->sun_path, path, strlen(path) + 1);
    return ENG_OK;
  }
  int length = snprintf(out->sun_path, sizeof out->sun_path, "/proc/self/fd/%d/%s", folder, name);
  if (length > 0 && (size_t)length < sizeof out->sun_path) return ENG_OK;
  // 24 bytes: "/proc/self/fd/", a descriptor of up to 8 digits, a slash and the final 0
  return error_set(ENG_ERR_IO, "%s: expected a socket name of at most %d bytes, got %zu", path,
                   (int)sizeof out->sun_path - 24, strlen(name));
}

/// Opens the directory of `path`. Sets *name to the part after the last slash.
static eng_status open_folder(int *folder, const char **name, const char *path)
{
  const char *slash = strrchr(path, '/');
  *name = slash ? slash + 1 : path;
  FREED char *parent = file_parent(path);
  FAIL_IF(!parent, ENG_ERR_MEMORY, "%s: out of memory", path);
  *folder = open(parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
  return *folder >= 0
           ? ENG_OK : error_set(ENG_ERR_IO, "%s: cannot open: %s", parent, strerror(errno));
}

/// Creates a socket whose calls never block.
static eng_status make_socket(int *fd, const char *path)
{
  *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  return *fd >= 0 ? ENG_OK : error_set(ENG_ERR_IO, "%s: cannot make a socket: %s", path,
                                       strerror(errno));
}

// ---- the server side

/// Removes a socket file on which no process listens, if there is one. Errors: STATE (a process
/// listens), IO (another kind of file).
static eng_status remove_stale(const struct sockaddr_un *address, const char *path, int folder,
                               const char *name)
{
  struct stat there;
  if (fstatat(folder, name, &there, AT_SYMLINK_NOFOLLOW) != 0) return ENG_OK;
  FAIL_IF(!S_ISSOCK(there.st_mode), ENG_ERR_IO,
          "%s: expected a socket, found another kind of file; hint: move it away", path);
  int fd;
  ENG_TRY(make_socket(&fd, path));
  bool answered =
    connect(fd, (const struct sockaddr *)address, sizeof *address) == 0 || errno == EAGAIN;
  close(fd);
  FAIL_IF(answered, ENG_ERR_STATE, "%s: another process listens on this socket; hint: does another "
          "run use this folder?", path);
  unlinkat(folder, name, 0);
  return ENG_OK;
}

static eng_status listen_at(eng_attach *server, const char *path)
{
  struct sockaddr_un address;
  struct stat made;
  ENG_TRY(address_of(&address, path, server->folder, server->name));
  ENG_TRY(remove_stale(&address, path, server->folder, server->name));
  ENG_TRY(make_socket(&server->fd, path));
  // bind gives the file the mode of the socket. So the mode is set before bind, and other users can
  // never connect.
  FAIL_IF(fchmod(server->fd, 0600) != 0 ||
          bind(server->fd, (const struct sockaddr *)&address, sizeof address) != 0, ENG_ERR_IO,
          "%s: cannot make a socket: %s", path, strerror(errno));
  if (fstatat(server->folder, server->name, &made, AT_SYMLINK_NOFOLLOW) == 0) {
    server->device = made.st_dev;
    server->inode = made.st_ino;
  }
  FAIL_IF(fchmodat(server->folder, server->name, 0600, 0) != 0 || listen(server->fd, CLIENTS) != 0,
          ENG_ERR_IO, "%s: cannot listen: %s", path, strerror(errno));
  return ENG_OK;
}

eng_status eng_attach_open(eng_attach **out, const char *path)
{
  const char *name;
  *out = NULL;
  eng_attach *server = calloc(1, sizeof *server);
  FAIL_IF(!server, ENG_ERR_MEMORY, "%s: out of memory", path);
  server->fd = server->folder = -1;
  for (int i = 0; i < CLIENTS; i++) server->clients[i].fd = -1;
  eng_status status = open_folder(&server->folder, &name, path);
  if (status == ENG_OK && (server->name = strdup(name)) == NULL)
    status = error_set(ENG_ERR_MEMORY, "%s: out of memory", path);
  if (status == ENG_OK) status = listen_at(server, path);
  if (status != ENG_OK) eng_attach_close(server);
  else *out = server;
  return status;
}

/// Closes the connection. The lines that the client has sent are still served.
static void disconnect(eng_attach *server, client *c)
{
  if (c->fd < 0) return;
  close(c->fd);
  c->fd = -1;
  bytes_free(&c->out);
  server->count--;
}

void eng_attach_close(eng_attach *server)
{
  struct stat there;
  if (!server) return;
  for (int i = 0; i < CLIENTS; i++) {
    disconnect(server, &server->clients[i]);
    bytes_free(&server->clients[i].in);
  }
  if (server->inode && fstatat(server->folder, server->name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
      there.st_dev == server->device && there.st_ino == server->inode)
    unlinkat(server->folder, server->name, 0);
  if (server->fd >= 0) close(server->fd);
  if (server->folder >= 0) close(server->folder);
  free(server->name);
  free(server);
}

static bool is_owner(int fd)
{
  struct ucred peer;
  socklen_t size = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == geteuid() || peer.uid == 0);
}

static void accept_clients(eng_attach *server)
{
  int fd;
  while ((fd = accept4(server->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
    client *free_one = NULL;
    for (int i = 0; i < CLIENTS; i++)
      if (server->clients[i].fd < 0 && !line_end(&server->clients[i].in))
        free_one = &server->clients[i];
    if (!free_one || !is_owner(fd)) {
      close(fd);
      continue;
    }
    bytes_free(&free_one->in);
    *free_one = (client){.fd = fd, .number = ++server->last_number};
    server->count++;
  }
}

/// Sends as much as the socket accepts. Drops the rest if the client has disconnected; what it sent
/// before that can still be read.
static void push_out(client *c)
{
  while (c->out.from < c->out.size) {
    ssize_t sent = send(c->fd, c->out.data + c->out.from, (size_t)(c->out.size - c->out.from),
                        MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) bytes_free(&c->out);
      return;
    }
    c->out.from += sent;
  }
}

/// Reads up to CHUNK available bytes. Returns false when the client has disconnected or sent a line
/// that is too long.
static bool pull_in(client *c)
{
  char chunk[CHUNK];
  ssize_t got = recv(c->fd, chunk, sizeof chunk, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  if (bytes_add(&c->in, chunk, got, ENG_ATTACH_LINE)) return true;
  static const char answer[] = "{\"ok\":false,\"error\":\"the line is too long\"}\n";
  if (bytes_add(&c->out, answer, sizeof answer - 1, ENG_ATTACH_ANSWER)) push_out(c);
  return false;
}

/// Returns whether to read more bytes from a client. The answer is false if the client's buffer has
/// a complete line and is at least half full: more bytes could then exceed the buffer's limit, the
/// length of one line, although no line is too long.
static bool has_room(const client *c)
{ return c->in.size - c->in.from < ENG_ATTACH_LINE / 2 || !line_end(&c->in); }

static bool next_line(const char **line, int64_t *length, int *number, eng_attach *server)
{
  for (int i = 0; i < CLIENTS; i++) {
    int place = (server->turn + i) % CLIENTS;
    client *c = &server->clients[place];
    const char *text = bytes_line(&c->in, length);
    if (!text) continue;
    server->turn = place + 1;    // so that a client that keeps sending does not block the other
                                 // clients
    *line = text;
    *number = c->number;
    return true;
  }
  return false;
}

bool eng_attach_poll(const char **line, int64_t *length, int *number, eng_attach *server,
                     int milliseconds)
{
  struct pollfd wanted[1 + CLIENTS];
  int polled[1 + CLIENTS], n = 1;
  wanted[0] = (struct pollfd){.fd = server->fd, .events = POLLIN};
  for (int i = 0; i < CLIENTS; i++) {
    const client *c = &server->clients[i];
    if (line_end(&c->in)) milliseconds = 0;
    if (c->fd < 0) continue;
    polled[n] = i;
    wanted[n++] = (struct pollfd){
      .fd = c->fd,
      .events = (short)((has_room(c) ? POLLIN : 0) | (c->out.from < c->out.size ? POLLOUT : 0))};
  }
  if (poll(wanted, (nfds_t)n, milliseconds) <= 0) return next_line(line, length, number, server);
  for (int k = 1; k < n; k++) {
    client *c = &server->clients[polled[k]];
    if (wanted[k].revents == 0) continue;
    // A client that has closed its end (POLLHUP, POLLERR) leaves once all that it sent is read.
    bool reads = has_room(c) && wanted[k].revents & (POLLIN | POLLHUP | POLLERR);
    if (reads && !pull_in(c)) disconnect(server, c);
    else push_out(c);
  }
  // This comes after the loop, because a client that the loop disconnected has freed a slot.
  if (wanted[0].revents) accept_clients(server);
  return next_line(line, length, number, server);
}

static client *find(eng_attach *server, int number)
{
  for (int i = 0; i < CLIENTS; i++)
    if (server->clients[i].fd >= 0 && server->clients[i].number == number)
      return &server->clients[i];
  return NULL;
}

void eng_attach_answer(eng_attach *server, int number, const char *text, int64_t size)
{
  client *c = find(server, number);
  if (!c) return;
  if (!bytes_add(&c->out, text, size, ENG_ATTACH_ANSWER) ||
      !bytes_add(&c->out, "\n", 1, ENG_ATTACH_ANSWER))
    disconnect(server, c);
  else push_out(c);
}

bool eng_attach_here(eng_attach *server, int number) { return find(server, number) != NULL; }

int eng_attach_count(const eng_attach *server) { return server->count; }

// ---- the client side

struct eng_attach_link { int fd; bytes in; };

eng_status eng_attach_connect(eng_attach_link **out, const char *path)
{
  struct sockaddr_un address;
  const char *name;
  int folder = -1, fd = -1;
  *out = NULL;
  ENG_TRY(open_folder(&folder, &name, path));
  eng_attach_link *link = calloc(1, sizeof *link);
  eng_status status =
    link ? make_socket(&fd, path) : error_set(ENG_ERR_MEMORY, "%s: out of memory", path);
  if (status == ENG_OK) status = address_of(&address, path, folder, name);
  if (status == ENG_OK && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
    bool deserted = errno == ENOENT || errno == ECONNREFUSED;
    const char *why = deserted ? "no run is listening there"
                      : errno == EAGAIN
                        ? "too many clients are waiting, and the run does not answer"
                        : strerror(errno);
    status = error_set(deserted ? ENG_ERR_STATE : ENG_ERR_IO, "%s: %s", path, why);
  }
  close(folder);
  if (status != ENG_OK) {
    if (fd >= 0) close(fd);
    free(link);
    return status;
  }
  link->fd = fd;
  *out = link;
  return ENG_OK;
}

eng_status eng_attach_send(eng_attach_link *link, const char *text, int64_t size)
{
  while (size > 0) {
    ssize_t sent = send(link->fd, text, (size_t)size, MSG_NOSIGNAL);
    FAIL_IF(sent < 0 && errno != EAGAIN && errno != EINTR, ENG_ERR_IO, "the run has ended");
    if (sent < 0) {
      FAIL_IF(eng_interrupted() > 0, ENG_ERR_INTERRUPTED, "interrupted");
      poll(&(struct pollfd){.fd = link->fd, .events = POLLOUT}, 1, 200);
      continue;
    }
    text += sent;
    size -= sent;
  }
  return ENG_OK;
}

eng_status eng_attach_receive(const char **line, int64_t *length, eng_attach_link *link,
                              double seconds)
{
  const double until = eng_clock() + seconds;
  char chunk[CHUNK];
  for (;;) {
    *line = bytes_line(&link->in, length);
    if (*line) return ENG_OK;
    double left = until - eng_clock();
    FAIL_IF(eng_interrupted() > 0, ENG_ERR_INTERRUPTED, "interrupted");
    FAIL_IF(left <= 0, ENG_ERR_STATE, "the run has not answered within %g seconds", seconds);
    struct pollfd wanted = {.fd = link->fd, .events = POLLIN};
    if (poll(&wanted, 1, left < 0.2 ? (int)(left * 1000) + 1 : 200) <= 0) continue;
    ssize_t got = recv(link->fd, chunk, sizeof chunk, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    FAIL_IF(got <= 0, ENG_ERR_IO, "the run has ended");
    FAIL_IF(!bytes_add(&link->in, chunk, got, ENG_ATTACH_ANSWER + CHUNK), ENG_ERR_IO,
            "the run's answer is longer than %d bytes", ENG_ATTACH_ANSWER + CHUNK);
  }
}

void eng_attach_leave(eng_attach_link *link)
{
  if (!link) return;
  close(link->fd);
  bytes_free(&link->in);
  free(link);
}
