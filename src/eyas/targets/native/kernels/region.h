// The threads of a pass, which share its work: each begins with a part of its own, and then helps the others.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace eyas {

constexpr int64_t PIECE = 4;  // panels of experts that a thread takes at once

class Region {
  public:
    Region(int64_t phases, int64_t threads) : threads_(threads), taken_(new std::atomic<int64_t>[phases * threads]()) {}
    ~Region() { delete[] taken_; }

    // Take pieces of `total` until none is left, then wait for the other threads. A thread's own part is taken in order,
    // so that what a product fetches ahead is what this thread works on next.
    template <class Work>
    void share(int64_t phase, int64_t total, int64_t piece, const Work& work) {
        for (int64_t turn = 0; turn < threads_; turn++) {
            const int64_t part = (omp_get_thread_num() + turn) % threads_;
            const int64_t begin = total * part / threads_, end = total * (part + 1) / threads_;
            for (;;) {
                const int64_t first = begin + taken_[phase * threads_ + part].fetch_add(piece, std::memory_order_relaxed);
                if (first >= end) break;
                work(first, first + piece < end ? first + piece : end);
            }
        }
#pragma omp barrier
    }

  private:
    int64_t threads_;
    std::atomic<int64_t>* taken_;  // [phases, threads] of each part
};

}  // namespace eyas
