// The `engine` binary: LuaJIT with the engine. It accepts the command line of the standalone lua
// interpreter, so that Lua tools run under it, plus subcommands written in Lua (lua/engine/cli).
// Owns the Lua state and the REPL's terminal. Called by the system and, through engine.host, by
// Lua.
#define _GNU_SOURCE
#include "engine.h"     // eng_version, eng_interrupted
#include "line.h"       // line_read
#include "openmp.h"     // openmp_configure
#include "signals.h"    // signals_catch

#include <dlfcn.h>      // dladdr
#include <errno.h>
#include <limits.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <lua.h>
#include <lauxlib.h>
#include <luajit.h>
#include <lualib.h>

static int rank, ranks;        // this process's rank and the number of ranks; alone: 0 and 1
// root: the folder of Lua modules
static char executable[PATH_MAX], library[PATH_MAX], root[PATH_MAX + 8];

// ------------------------------------------------------------------ errors

// Whether a position, "file:line: ...", is in the engine's own Lua files. Lua truncates long paths
// at the front.
static bool is_own_place(const char *place, size_t length)
{
  size_t n = strlen(root);
  if (length > n && memcmp(place, root, n) == 0 && strncmp(place + n, "/engine/", 8) == 0)
    return true;
  return length > 3 && memcmp(place, "...", 3) == 0 &&
         (memmem(place, length, "/lua/engine/", 12) ||
          memmem(place, length, "/lua/5.1/engine/", 16));
}

static int run_status;         // the most serious status of the runs that have ended
enum { RESULTS_LOST = 5, DRIFTED = 6 };   // as in lua/engine/train/loop.lua

// Prints an error. Ranks usually fail with the same error, so rank 0 prints it and ends the job.
// Other ranks wait for half a second and print their error only if the job has not ended by then.
// They print nothing if a signal stopped them. They also print nothing after a run with the status
// DRIFTED (the ranks' weights differ), because rank 0 prints the same error.
static void complain(const char *message)
{
  static char text[1 << 16];              // only the main thread calls this
  eng_text_shown(text, sizeof text, message, (int64_t)strlen(message), true);
  fflush(stdout);
  if (rank > 0) {
    int before = eng_interrupted();
    if (before == 2 || run_status == DRIFTED) return;   // 2: a signal stopped this rank
    for (int i = 0; i < 50; i++) usleep(10000);
    if (eng_interrupted() > before) return;
    fprintf(stderr, "engine: rank %d: %s\n", rank, text);
  } else fprintf(stderr, "engine: %s\n", text);
  fflush(stderr);
}

static bool is_plumbing(const char *frame)
{
  static const char *const names[] = {"[C]: in function 'error'", "[C]: in function 'pcall'",
                                      "[C]: in function 'xpcall'"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strncmp(frame, names[i], strlen(names[i])) == 0) return true;
  return false;
}

// Pushes `text`, a message with its traceback, shortened for the script's author. Drops the frames
// of the engine's own files and of error, pcall and xpcall. Then drops the whole traceback if it
// only repeats the message's position. Also drops it if it had own frames and the message names a
// file (such as a policy) that has no frame in it. A message about the engine's own files keeps its
// complete traceback.
static void push_trimmed(lua_State *L, const char *text)
{
  static const char head[] = "\nstack traceback:";
  const char *trace = strstr(text, head);
  if (!trace || is_own_place(text, strcspn(text, "\n"))) { lua_pushstring(L, text); return; }
  luaL_Buffer kept;
  luaL_buffinit(L, &kept);
  luaL_addlstring(&kept, text, (size_t)(trace - text) + strlen(head));
  // own: length of the message's position, "file.lua:" or "file.lua:LINE:"
  size_t dropped = 0, others = 0, own = strcspn(text, " \n");
  bool elsewhere = own >= 5 && text[own - 1] == ':' && memmem(text, own, ".lua:", 5);
  for (const char *line = trace + strlen(head), *stop; *line; line = stop) {
    const char *frame = line + strspn(line, "\n\t"), *in = strstr(frame, ": in ");
    size_t length = strcspn(frame, "\n"), place = in ? (size_t)(in + 1 - frame) : length;
    stop = frame + length;                                   // place: length of "file:line:"
    if (place == own && strncmp(text, frame, own) == 0) elsewhere = false;
    if (is_own_place(frame, length)) {
      dropped++;
    } else if (!is_plumbing(frame)) {
      if (others > 0 || strncmp(text, frame, place) != 0) others++;
      luaL_addlstring(&kept, line, (size_t)(stop - line));
    }
  }
  luaL_pushresult(&kept);
  if (others > 0 && !(dropped > 0 && elsewhere)) return;
  lua_pop(L, 1);
  lua_pushlstring(L, text, (size_t)(trace - text));
}

static bool keeps_locals;      // -i: after a script, the REPL sees the locals of its main chunk

// Makes the locals of the main chunk global, except for names already in use.
static void keep_locals(lua_State *L)
{
  lua_Debug chunk, frame;
  bool found = false;
  for (int level = 0; lua_getstack(L, level, &frame); level++) {
    lua_getinfo(L, "S", &frame);
    if (strcmp(frame.what, "main") == 0) { chunk = frame; found = true; }
  }
  const char *name;
  for (int i = 1; found && (name = lua_getlocal(L, &chunk, i)); i++) {
    lua_pushstring(L, name);
    lua_rawget(L, LUA_GLOBALSINDEX);
    bool taken = !lua_isnil(L, -1) || name[0] == '(';
    lua_pop(L, 1);
    if (taken) { lua_pop(L, 1); continue; }
    lua_pushstring(L, name);
    lua_insert(L, -2);
    lua_rawset(L, LUA_GLOBALSINDEX);
  }
}

// Converts an error value to text, with a traceback unless the value asks for none. nil stays nil.
static int on_error(lua_State *L)
{
  if (keeps_locals) keep_locals(L);
  // a metatable with traceback = false marks a mistake in the user's input, not in the script
  if (lua_istable(L, 1) && luaL_getmetafield(L, 1, "traceback")) {
    bool plain = !lua_toboolean(L, -1);
    lua_settop(L, 1);
    if (plain && luaL_callmeta(L, 1, "__tostring")) return 1;
  }
  if (lua_isnil(L, 1)) return 1;   // error() without a value: how busted exits silently
  if (!lua_isstring(L, 1)) {
    if (!luaL_callmeta(L, 1, "__tostring") || !lua_isstring(L, -1))
      lua_pushfstring(L, "error object of type %s", luaL_typename(L, 1));
    lua_replace(L, 1);
    lua_settop(L, 1);
  }
  if (!strstr(lua_tostring(L, 1), "\nstack traceback:"))
    luaL_traceback(L, L, lua_tostring(L, 1), 1);
  push_trimmed(L, lua_tostring(L, -1));
  return 1;
}

// Calls the function that lies below its `n_args` arguments on the stack. On an error prints the
// message, unless it is nil, and returns false.
static bool call(lua_State *L, int n_args, int n_results)
{
  int base = lua_gettop(L) - n_args;
  lua_pushcfunction(L, on_error);
  lua_insert(L, base);
  int status = lua_pcall(L, n_args, n_results, base);
  lua_remove(L, base);
  if (status == 0) return true;
  if (!lua_isnil(L, -1))
    complain(lua_isstring(L, -1) ? lua_tostring(L, -1) : "error in error handling");
  lua_pop(L, 1);
  return false;
}

static bool call_loaded(lua_State *L, int load_status)
{
  if (load_status == 0) return call(L, 0, 0);
  complain(lua_tostring(L, -1));
  lua_pop(L, 1);
  return false;
}

// Calls `require(name)` and leaves the module on the stack. On an error prints the message and
// returns false.
static bool require(lua_State *L, const char *name)
{
  lua_getglobal(L, "require");
  lua_pushstring(L, name);
  return call(L, 1, 1);
}

// ------------------------------------------------------------------ functions for Lua's REPL

// Calls the completer, a Lua function. `data` is the Lua state of l_read, which has the completer
// at stack index 2.
static void complete(void *data, const char *before, char *insert, size_t insert_size, char *list,
                     size_t list_size)
{
  lua_State *L = data;
  int top = lua_gettop(L);
  lua_pushvalue(L, 2);
  lua_pushstring(L, before);
  if (lua_pcall(L, 1, 2, 0) == 0) {
    const char *to_insert = lua_tostring(L, -2), *to_show = lua_tostring(L, -1);
    if (to_insert) snprintf(insert, insert_size, "%s", to_insert);
    if (to_show) snprintf(list, list_size, "%s", to_show);
  }
  lua_settop(L, top);
}

// read(prompt, completer) -> line, or nil and "end" or "interrupted". The completer receives the
// line up to the cursor and returns the text to insert and the text to show, or nil.
static int l_read(lua_State *L)
{
  const char *prompt = luaL_checkstring(L, 1), *text;
  lua_settop(L, 2);
  line_result result = line_read(&text, prompt, lua_isfunction(L, 2) ? complete : NULL, L);
  if (result == LINE_OK) {
    lua_pushstring(L, text);
    return 1;
  }
  signals_clear(L);
  lua_pushnil(L);
  lua_pushstring(L, result == LINE_END ? "end" : "interrupted");
  return 2;
}

static int l_history_load(lua_State *L)
{
  line_history_load(luaL_checkstring(L, 1));
  return 0;
}

static int l_history_add(lua_State *L)
{
  line_history_add(luaL_checkstring(L, 1), luaL_optstring(L, 2, NULL));
  return 0;
}

// trim(text): returns a message with its traceback as push_trimmed shortens it.
static int l_trim(lua_State *L)
{
  push_trimmed(L, luaL_checkstring(L, 1));
  return 1;
}

static int seriousness(int status) { return status >= 128 ? 1 : status; }

// run_status(status): called with 0 when a run begins, and with the run's status (as in
// lua/engine/train/loop.lua) when it has ended. The most serious status becomes the exit status,
// unless the script fails for another reason.
static int l_run_status(lua_State *L)
{
  int status = luaL_checkint(L, 1);
  signals_run_begun();
  if (seriousness(status) > seriousness(run_status)) run_status = status;
  return 0;
}

// keep(): makes the script's locals global. Called at the end of a script run with -i.
static int l_keep(lua_State *L)
{
  keep_locals(L);
  return 0;
}

// settle() -> whether an interrupt was pending; clears it.
static int l_settle(lua_State *L)
{
  lua_pushboolean(L, signals_clear(L));
  return 1;
}

// require "engine.host": functions of the binary for Lua modules.
static int open_host(lua_State *L)
{
  static const luaL_Reg functions[] = {
    {"read", l_read}, {"history_load", l_history_load}, {"history_add", l_history_add},
    {"settle", l_settle}, {"trim", l_trim}, {"keep", l_keep}, {"run_status", l_run_status},
    {NULL, NULL},
  };
  lua_createtable(L, 0, 12);
  luaL_register(L, NULL, functions);
  lua_pushstring(L, executable);       lua_setfield(L, -2, "executable");
  lua_pushstring(L, library);          lua_setfield(L, -2, "library");
  lua_pushstring(L, root);             lua_setfield(L, -2, "root");
  lua_pushstring(L, eng_version());    lua_setfield(L, -2, "version");
  lua_pushstring(L, LUAJIT_VERSION);   lua_setfield(L, -2, "luajit");
  lua_pushboolean(L, line_is_edited()); lua_setfield(L, -2, "edited");
  return 1;
}

// ------------------------------------------------------------------ paths

static bool has_modules(const char *folder)
{
  char file[2 * PATH_MAX + 32];
  snprintf(file, sizeof file, "%s/engine/cli/init.lua", folder);
  return access(file, R_OK) == 0;
}

// Finds the executable, the library it is linked with, and the Lua modules: ../share/lua/5.1 when
// installed, lua/ in the tree (../lua for a build in build, ../../lua for one in build/NAME).
// Returns false if there are no Lua modules.
static bool find_places(const char *argv0)
{
  static const char *const places[] = {"lua", "../share/lua/5.1", "../../lua", "../lua"};
  if (!realpath("/proc/self/exe", executable) && !realpath(argv0, executable))
    snprintf(executable, sizeof executable, "%s", argv0);

  Dl_info where;
  if (dladdr((void *)(uintptr_t)eng_version, &where) && where.dli_fname &&
      !realpath(where.dli_fname, library))
    snprintf(library, sizeof library, "%s", where.dli_fname);

  char folder[PATH_MAX];
  snprintf(folder, sizeof folder, "%s", executable);
  char *slash = strrchr(folder, '/');
  if (slash) *slash = 0;
  else strcpy(folder, ".");
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    char candidate[2 * PATH_MAX];
    snprintf(candidate, sizeof candidate, "%s/%s", folder, places[i]);
    if (has_modules(candidate) && realpath(candidate, root)) return true;
  }
  snprintf(root, sizeof root, "%s/lua", folder);
  return false;
}

// Prepends the pattern `first` to the search path package[name]. The pattern is relative to the
// folder of Lua modules. `package` is on top of the stack.
static void put_first(lua_State *L, const char *name, const char *first)
{
  lua_getfield(L, -1, name);
  lua_pushfstring(L, "%s/%s;%s", root, first, lua_tostring(L, -1));
  lua_setfield(L, -3, name);
  lua_pop(L, 1);
}

static void set_path(lua_State *L)
{
  lua_getglobal(L, "package");
  put_first(L, "path", "?/init.lua");
  put_first(L, "path", "?.lua");
  put_first(L, "cpath", "../lib/lua/?.so");   // a folder made by `make dist` has its own modules
  lua_getfield(L, -1, "preload");
  lua_pushcfunction(L, open_host);
  lua_setfield(L, -2, "engine.host");
  lua_pop(L, 2);
}

// ------------------------------------------------------------------ the command line

typedef struct options {
  bool interactive, version, ignore_environment, executes;
  int script;               // index of the script in argv; argc: none
} options;

static void usage(void)
{
  fputs("usage: engine [options] [script.lua [name=value ...]]\n"
        "  -e code   run code                       -l name   require a module\n"
        "  -i        open the REPL at the end       -v        show the version\n"
        "  -j cmd    control the JIT (e.g. -j off)  -O level  set the JIT's optimisation\n"
        "  -E        ignore LUA_INIT                -         run stdin\n"
        "  --        end of options\n"
        "engine --help lists the commands and shows examples.\n", stderr);
}

// Fills `o`. Returns false for an option that is unknown or lacks its argument; o->script is then
// the option's index.
static bool parse(options *o, int argc, char **argv)
{
  for (o->script = 1; o->script < argc; o->script++) {
    const char *option = argv[o->script];
    if (option[0] != '-' || !option[1]) break;
    if (strcmp(option, "--") == 0) { o->script++; break; }
    switch (option[1]) {
    case 'i': o->interactive = true;  // fall through
    case 'v': o->version = true; if (option[2]) return false; break;
    case 'E': o->ignore_environment = true; if (option[2]) return false; break;
    case 'e': o->executes = true;     // fall through
    case 'l': case 'j':
      if (!option[2] && o->script + 1 == argc) return false;
      if (!option[2]) o->script++;
      break;
    case 'O': break;
    default: return false;
    }
  }
  return true;
}

// Pushes the comma-separated parts of a text and returns their number.
static int push_words(lua_State *L, const char *text)
{
  int count = 0;
  for (const char *end; *text; text = *end ? end + 1 : end, count++) {
    end = strchrnul(text, ',');
    lua_pushlstring(L, text, (size_t)(end - text));
  }
  return count;
}

// Runs the option -j cmd[=args]: calls jit.cmd(args) or, if there is no such function, `start` of
// the module jit.cmd. The name of the command ends at "=" or at the end of `command`. `args` are
// separated by commas.
static bool jit_command(lua_State *L, const char *command, const char *args)
{
  lua_getglobal(L, "jit");
  lua_pushlstring(L, command, strcspn(command, "="));
  lua_gettable(L, -2);
  if (!lua_isfunction(L, -1)) {
    lua_settop(L, 0);
    lua_pushliteral(L, "jit.");
    lua_pushlstring(L, command, strcspn(command, "="));
    lua_concat(L, 2);
    if (!require(L, lua_tostring(L, 1))) return false;
    lua_getfield(L, -1, "start");
  }
  bool ok = call(L, push_words(L, args), 0);
  lua_settop(L, 0);
  return ok;
}

static bool run_options(lua_State *L, const options *o, char **argv)
{
  for (int i = 1; i < o->script; i++) {
    char kind = argv[i][1];
    if (argv[i][0] != '-' || kind == '-') continue;
    const char *value = argv[i] + 2;
    if ((kind == 'e' || kind == 'l' || kind == 'j') && !*value) value = argv[++i];
    bool ok = true;
    if (kind == 'e') {
      ok = call_loaded(L, luaL_loadbuffer(L, value, strlen(value), "=(command line)"));
    } else if (kind == 'l') {
      ok = require(L, value);
      lua_settop(L, 0);
    } else if (kind == 'j') {
      const char *equals = strchr(value, '=');
      ok = jit_command(L, value, equals ? equals + 1 : "");
    } else if (kind == 'O') {
      ok = jit_command(L, "opt", *value ? value : "3");
    }
    if (!ok) return false;
  }
  return true;
}

// Sets the global `arg`: arg[0] is the script, and the words before the script have negative
// indices. Without a script, arg[0] is the name of the binary.
static void set_arg(lua_State *L, int argc, char **argv, int script)
{
  if (script >= argc) script = 0;
  lua_createtable(L, argc - script, script);
  for (int i = 0; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - script);
  }
  lua_setglobal(L, "arg");
}

// Loads a script whose locals the REPL keeps: adds a call of keep() at the script's end, or before
// its final `return`.
static bool load_kept(lua_State *L, const char *name)
{
  static const char keep[] = "\nrequire('engine.host').keep() ";
  FILE *file = fopen(name, "rb");                 // may be a pipe
  if (!file) return false;
  luaL_Buffer read;
  luaL_buffinit(L, &read);
  for (size_t n; (n = fread(luaL_prepbuffer(&read), 1, LUAL_BUFFERSIZE, file)) > 0;)
    luaL_addsize(&read, n);
  fclose(file);
  luaL_pushresult(&read);
  int top = lua_gettop(L);
  size_t length, before;
  const char *text = lua_tolstring(L, top, &length), *chunk = lua_pushfstring(L, "@%s", name);
  lua_pushvalue(L, top);
  lua_pushstring(L, keep);
  lua_concat(L, 2);
  bool good = luaL_loadbuffer(L, lua_tostring(L, -1), lua_objlen(L, -1), chunk) == 0;
  for (before = length; !good && before > 0 && strncmp(text + before, "\nreturn", 7) != 0;)
    before--;
  if (!good && before > 0) {
    lua_pushlstring(L, text, before);
    lua_pushstring(L, keep);
    lua_pushstring(L, text + before + 1);
    lua_concat(L, 3);
    good = luaL_loadbuffer(L, lua_tostring(L, -1), lua_objlen(L, -1), chunk) == 0;
  }
  if (good) lua_insert(L, top);
  lua_settop(L, good ? top : top - 1);
  return good;
}

// Appends a hint to the message on top of the stack, if there is no script `name`.
static void add_hint(lua_State *L, const char *name)
{
  int top = lua_gettop(L);
  if (!name || eng_file_kind(name) != ENG_FILE_NONE) return;
  if (require(L, "engine.cli")) {
    lua_getfield(L, -1, "script_hint");
    lua_replace(L, -2);
    lua_pushstring(L, name);
    if (call(L, 1, 1)) {
      lua_concat(L, 2);
      return;
    }
  }
  lua_settop(L, top);
}

static bool run_script(lua_State *L, int argc, char **argv, int script)
{
  const char *name = argv[script];
  if (strcmp(name, "-") == 0 && strcmp(argv[script - 1], "--") != 0) name = NULL;
  if (!(keeps_locals && name && load_kept(L, name)) && luaL_loadfile(L, name) != 0) {
    add_hint(L, name);
    return call_loaded(L, 1);
  }
  for (int i = script + 1; i < argc; i++) lua_pushstring(L, argv[i]);
  return call(L, argc - script - 1, 0);
}

// Calls require("engine.cli")(name, arguments ...) and returns the exit code.
static int run_command(lua_State *L, const char *name, int argc, char **argv, int first)
{
  if (!require(L, "engine.cli")) return EXIT_FAILURE;
  lua_pushstring(L, name);
  for (int i = first; i < argc; i++) lua_pushstring(L, argv[i]);
  if (!call(L, 1 + (argc > first ? argc - first : 0), 1)) return EXIT_FAILURE;
  return (int)lua_tointeger(L, -1);
}

// Reports misspelt ENGINE_ variables, and unknown values of known variables. Without this report
// the engine would ignore them silently. Does nothing if the Lua modules or docs/environment.md are
// missing.
static void check_variables(lua_State *L)
{
  enum { MOST = 100 };
  int top = lua_gettop(L), n = 0;
  for (char **v = environ; *v && n < MOST; v++) {
    if (strncmp(*v, "ENGINE_", 7) != 0) continue;
    if (n == 0) {
      lua_getglobal(L, "require");
      lua_pushliteral(L, "engine.cli.environment");
      if (!lua_checkstack(L, MOST + 8) || lua_pcall(L, 1, 1, 0) != 0) break;
    }
    lua_pushlstring(L, *v, strcspn(*v, "="));
    n++;
  }
  if (n > 0) lua_pcall(L, n, 0, 0);
  lua_settop(L, top);
}

static bool run_environment(lua_State *L)
{
  const char *init = getenv("LUA_INIT");
  if (!init) return true;
  if (init[0] == '@') return call_loaded(L, luaL_loadfile(L, init + 1));
  return call_loaded(L, luaL_loadbuffer(L, init, strlen(init), "=LUA_INIT"));
}

// Checks that LuaJIT has GC64. Tables and policies keep data for the whole run, so the heap of 1
// GiB without GC64 is too small.
static bool check_gc64(lua_State *L)
{
  static const char code[] = "return require('ffi').abi('gc64')";
  bool wide = luaL_loadbuffer(L, code, sizeof code - 1, "=gc64") == 0 &&
              lua_pcall(L, 0, 1, 0) == 0 && lua_toboolean(L, -1);
  lua_settop(L, 0);
  if (!wide)
    complain("this LuaJIT was built without GC64, which limits Lua to 1 GiB; hint: use Debian's "
             "libluajit-5.1-2 or build LuaJIT with XCFLAGS=-DLUAJIT_ENABLE_GC64");
  return wide;
}

// Whether a word is a subcommand: it begins with a lowercase letter, has only lowercase letters,
// "_" and "-", and no file has this name. A folder of this name, such as runs/, does not count,
// because it is not a script.
static bool is_command(const char *word)
{
  int kind = eng_file_kind(word);
  return kind != ENG_FILE_REGULAR && kind != ENG_FILE_OTHER && word[0] >= 'a' && word[0] <= 'z' &&
         strspn(word, "abcdefghijklmnopqrstuvwxyz_-") == strlen(word);
}

static int run(lua_State *L, int argc, char **argv)
{
  const char *first = argc > 1 ? argv[1] : "";
  if (strcmp(first, "--help") == 0 || strcmp(first, "-h") == 0)
    return run_command(L, "help", argc, argv, 2);
  if (strcmp(first, "--version") == 0) return run_command(L, "version", argc, argv, 2);

  options o = {0};
  if (!parse(&o, argc, argv)) {
    fprintf(stderr, "engine: the option '%s' is unknown or lacks its argument\n", argv[o.script]);
    usage();
    return EXIT_FAILURE;
  }
  set_arg(L, argc, argv, o.script);
  if (!o.ignore_environment && !run_environment(L)) return EXIT_FAILURE;
  if (o.version && !(o.interactive && line_is_edited()))
    printf("engine %s -- %s\n", eng_version(), LUAJIT_VERSION);

  bool ok = run_options(L, &o, argv);
  if (ok && o.script < argc) {
    if (is_command(argv[o.script])) {
      int code = run_command(L, argv[o.script], argc, argv, o.script + 1);
      int number = eng_interrupt_signal(0);
      return code != 0 && number && eng_interrupted() ? 128 + number : code;
    }
    keeps_locals = o.interactive;
    ok = run_script(L, argc, argv, o.script);
    keeps_locals = false;
  } else if (ok && !o.executes && !o.version) {
    if (isatty(STDIN_FILENO)) o.interactive = true;
    else ok = call_loaded(L, luaL_loadfile(L, NULL));
  }
  bool interrupted = signals_clear(L);
  // -i starts the REPL after an error too, so that the script's variables can be inspected
  if (o.interactive) {
    ok = require(L, "engine.cli.repl") && call(L, 0, 0);
    run_status = 0;
  } else if (!ok && interrupted) {
    return 128 + eng_interrupt_signal(0);
  }
  bool together = ok || run_status == DRIFTED;    // ranks that drifted all have the same error
  if (together && run_status) { // every rank gets here, so the job ends without an abort
    fflush(stdout);             // now, because mpirun may end this rank once another has exited
    eng_comm_end(0);
  }
  return together ? run_status : EXIT_FAILURE;
}

// Removes the directories of runs that have not begun (lua/engine/run/run.lua).
static void abandon_runs(lua_State *L)
{
  static const char code[] = "local run = package.loaded['engine.run.run'] "
                             "if run then run.abandon() end";
  if (luaL_loadbuffer(L, code, sizeof code - 1, "=abandon") == 0) lua_pcall(L, 0, 0, 0);
}

// Writes the output to stdout that is still buffered. If output is lost now or was lost earlier,
// reports that and turns status 0 into RESULTS_LOST. Runs after os.exit() as well.
static void check_stdout(int status, void *nothing)
{
  (void)nothing;
  errno = 0;
  if (fflush(stdout) == 0 && !ferror(stdout)) return;
  fprintf(stderr, "engine: stdout: output is lost%s%s\n", errno ? ": " : "",
          errno ? strerror(errno) : "");
  if (status == EXIT_SUCCESS) _exit(RESULTS_LOST);
}

int main(int argc, char **argv)
{
  openmp_configure(argv);
  prctl(PR_SET_NAME, "engine");         // otherwise ps shows "exe" after the restart in openmp.c
  setlocale(LC_CTYPE, "");              // for the line editor; numbers keep the C locale
  on_exit(check_stdout, NULL);
  bool found = find_places(argv[0]);
  lua_State *L = luaL_newstate();
  if (!L) {
    complain("not enough memory for a Lua state");
    return EXIT_FAILURE;
  }
  luaL_openlibs(L);
  if (!check_gc64(L)) return EXIT_FAILURE;
  set_path(L);
  if (!found)
    fprintf(stderr,
            "engine: the engine's Lua modules are missing (looked for %s); hint: keep lua/ next to "
            "the binary, or use make install\n",
            root);
  eng_comm_launched(&rank, &ranks);
  signals_catch(L, rank, is_own_place);
  if (rank == 0) check_variables(L);

  int code = run(L, argc, argv);
  abandon_runs(L);
  line_close();
  signals_leave();
  lua_close(L);
  return code;
}
