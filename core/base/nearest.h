// The name somebody probably meant, for error messages. Used by policy_vm.c and policy_record.c.
#ifndef ENG_NEAREST_H
#define ENG_NEAREST_H

/// The entry of `names` with the fewest edits (insert, delete, replace, swap of neighbours) from
/// `name`, or NULL when more than a third of the letters would change.
const char *nearest_name(const char *name, const char *const *names, int n);

/// "; did you mean 'x'?" in a buffer of this thread that the next call reuses, "" when nothing is near.
const char *nearest_hint(const char *name, const char *const *names, int n);

#endif
