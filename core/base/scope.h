// Variables that release what they own when their block ends. Used by every folder.
#pragma once

/// Before a declaration: calls close(&variable) when the variable's block ends, also by `return`.
#define AT_END(close) __attribute__((cleanup(close)))
