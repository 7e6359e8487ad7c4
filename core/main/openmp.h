// Settings of OpenMP for the binary. Called by main.c.
#pragma once

/// If OpenMP needs other settings, sets them and executes the binary again, which takes one
/// millisecond. By default OpenMP's threads spin for milliseconds while they wait for each other,
/// which makes a busy machine ten times slower; spinning for about 50 us keeps the hand-over
/// between kernels quick. A stack size that is too large to start threads would end the process, so
/// it is reported and removed.
void openmp_configure(char **argv);
