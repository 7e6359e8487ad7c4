// Settings of OpenMP for the binary. Called by main.c.
#pragma once

/// Corrects the environment variables of OpenMP. If this changes a variable, executes the binary
/// again, which takes one millisecond. By default OpenMP's threads spin for milliseconds while they
/// wait for each other, which makes a busy machine ten times slower. So unless the user has set
/// GOMP_SPINCOUNT or OMP_WAIT_POLICY, sets GOMP_SPINCOUNT so that they spin for about 50 us, long
/// enough for the next kernel to start quickly. If threads cannot start with the stack size in
/// OMP_STACKSIZE or GOMP_STACKSIZE, reports and unsets that variable.
void openmp_configure(char **argv);
