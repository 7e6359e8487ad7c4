// The last error of each thread. Its text is made safe to print (eng_text_shown), because it may
// quote a policy or a file. See error.h. Owns the texts. Called by every folder below main/, and by
// Lua.
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[2048];

eng_status error_set(eng_status status, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  char text[sizeof message];
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  eng_text_shown(message, sizeof message, text, (int64_t)strlen(text), true);
  return status;
}

eng_status error_prefix(eng_status status, const char *format, ...)
{
  if (status == ENG_OK) return ENG_OK;
  char text[sizeof message], front[256];
  va_list args;
  va_start(args, format);
  vsnprintf(front, sizeof front, format, args);
  va_end(args);
  int room = (int)(sizeof text - strlen(front) - 3);
  snprintf(text, sizeof text, "%s: %.*s", front, room, message);
  eng_text_shown(message, sizeof message, text, (int64_t)strlen(text), true);
  return status;
}

const char *eng_error_message(void) { return message; }
