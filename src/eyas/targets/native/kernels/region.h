// The threads of a pass, which share its work piece by piece.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace eyas {

constexpr int64_t PIECE = 4;  // panels of experts that a thread takes at once

class Region {
  public:
    explicit Region(int64_t phases) : counters_(new std::atomic<int64_t>[phases]()) {}
    ~Region() { delete[] counters_; }

    // Take pieces of `total` until none is left, then wait for the other threads.
    template <class Work>
    void share(int64_t phase, int64_t total, int64_t piece, const Work& work) {
        for (;;) {
            int64_t begin = counters_[phase].fetch_add(piece, std::memory_order_relaxed);
            if (begin >= total) break;
            work(begin, begin + piece < total ? begin + piece : total);
        }
#pragma omp barrier
    }

  private:
    std::atomic<int64_t>* counters_;
};

}  // namespace eyas
