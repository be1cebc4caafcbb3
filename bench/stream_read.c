/* Read bandwidth of memory: cc -O3 -march=native -fopenmp stream_read.c && ./a.out MEBIBYTES SECONDS
 *
 * Every thread sums a part of a buffer that it wrote first, so that pages lie near it. Prints bytes a second of the best
 * pass. Sums of 64-bit words, in several chains, so that no add waits for the one before and memory is what limits. */
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { CHAINS = 8 };

static uint64_t sum(const uint64_t *words, size_t count) {
    uint64_t chains[CHAINS] = {0}, total = 0;
    for (size_t at = 0; at + CHAINS <= count; at += CHAINS)
        for (int chain = 0; chain < CHAINS; chain++) chains[chain] += words[at + chain];
    for (int chain = 0; chain < CHAINS; chain++) total += chains[chain];
    return total;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const size_t bytes = strtoull(argv[1], NULL, 10) << 20, count = bytes / sizeof(uint64_t);
    const double seconds = atof(argv[2]);
    uint64_t *words = aligned_alloc(4096, bytes), total = 0;
    if (words == NULL) return 1;
    double best = 0, end = 0;
#pragma omp parallel reduction(+ : total)
    {
        const size_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const size_t from = count / threads * thread, length = count / threads;
        for (size_t at = from; at < from + length; at++) words[at] = at;
#pragma omp barrier
#pragma omp single
        end = omp_get_wtime() + seconds;
        for (int pass = 0; pass < 1000; pass++) {
            double start = 0;
#pragma omp barrier
            if (thread == 0) start = omp_get_wtime();
            total += sum(words + from, length);
#pragma omp barrier
            if (thread == 0) {
                const double took = omp_get_wtime() - start;
                const double rate = length * threads * sizeof(uint64_t) / took;
                if (rate > best) best = rate;
                /* The others read it behind the next barrier, so that all leave in the same pass. */
                if (omp_get_wtime() > end && pass >= 4) end = 0;
            }
#pragma omp barrier
            if (end == 0) break;
        }
    }
    printf("%.0f\n", best);
    return total == 42; /* so that the sums are needed */
}
