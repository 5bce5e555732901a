// The threads of a pass, which share its work a stage at a time: whoever is there takes the next pieces of it.
//
// Other processes want the cores too, so nothing is kept for a thread that isn't running. The calling thread runs the
// stages, and does alone what nobody else has begun; helpers come when they can. It only waits for pieces that a helper
// has begun: for as long as its own take, then asleep, so that the system can let the helper run in its place. Where
// such waits cost more than the helpers do, passes go on without them, and try again after a while.
//
// Who computes a piece doesn't matter to its result.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "vector.h"

namespace eyas {

constexpr int64_t MOST_THREADS = 256;
constexpr int64_t PIECE = 4;  // panels of experts that a thread takes at once

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

inline double since(Clock::time_point began) { return Seconds(Clock::now() - began).count(); }

constexpr double SPIN = 30e-6;           // a helper that has nothing to do, or is waited for, may take so long to be seen
constexpr double LATE = 1e-3;            // waits in a pass that aren't given a second thought
constexpr double MEMORY = 0.1;           // how long gains and losses are remembered
constexpr double SHORTEST_PAUSE = 0.02, LONGEST_PAUSE = 0.8;  // without helpers

inline void futex_wait(std::atomic<int32_t>& word, int32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void futex_wake(std::atomic<int32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Number of this thread among those of its pass; the calling one is 0.
inline int64_t& worker() {
    static thread_local int64_t number = 0;
    return number;
}

// Whether helpers are worth their waits: by the time that they saved and the time that they were waited for.
class Worth {
  public:
    bool now() const { return Clock::now() >= alone_until_; }

    void count(double saved, double waited) {
        const Clock::time_point at = Clock::now();
        const double kept = std::exp(-Seconds(at - counted_).count() / MEMORY);
        counted_ = at;
        saved_ = saved_ * kept + saved, waited_ = waited_ * kept + waited;
        if (waited_ > LATE && waited_ > saved_) {
            alone_until_ = at + std::chrono::duration_cast<Clock::duration>(Seconds(pause_));
            pause_ = std::min(2 * pause_, LONGEST_PAUSE);
            saved_ = waited_ = 0;
        } else if (saved_ > MEMORY / 4 && saved_ > 2 * waited_) {
            pause_ = SHORTEST_PAUSE;
        }
    }

  private:
    Clock::time_point counted_, alone_until_;
    double saved_ = 0, waited_ = 0, pause_ = SHORTEST_PAUSE;
};

// The helpers of this process. One pass has them at a time; one that comes meanwhile runs alone.
class Helpers {
  public:
    static Helpers& all() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { instance() = new Helpers; });
        (void)registered;
        return *instance();
    }

    // Have `threads` - 1 of them. False where they are another pass's, aren't worth their waits, or none can be started.
    bool claim(int64_t threads) {
        if (threads < 2 || !in_use_.try_lock()) return false;
        if (worth_.now()) {
            while (static_cast<int64_t>(started_) < threads - 1 && start()) {
            }
            parts_count_ = std::min<int64_t>(threads, started_ + 1);
            saved_ = waited_ = 0;
            if (parts_count_ > 1) return true;
        }
        in_use_.unlock();
        return false;
    }

    void release() {
        worth_.count(saved_, waited_);
        in_use_.unlock();
    }

    bool are_late() const { return waited_ > LATE && waited_ > saved_; }

    // Run `work(first, stop)` on pieces of `total` until all are done. Each thread begins with a part of its own, taken
    // in order, so that what a product fetches ahead is what this thread works on next.
    template <class Work>
    void share(int64_t total, int64_t piece, const Work& work) {
        const int64_t pieces = (total + piece - 1) / piece;
        stage_ = {[](const void* of, int64_t first, int64_t stop) { (*static_cast<const Work*>(of))(first, stop); }, &work,
                  total, piece, _mm_getcsr()};
        finished_.store(0, std::memory_order_relaxed);
        for (int64_t part = 0; part < parts_count_; part++) {
            const uint64_t begin = pieces * part / parts_count_, end = pieces * (part + 1) / parts_count_;
            parts_[part].next.store(begin << 32 | end, std::memory_order_release);
        }
        stages_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) && asleep_.exchange(0)) futex_wake(stages_);
        const Clock::time_point began = Clock::now();
        const int64_t own = take(0);
        if (own == pieces) return;
        const double each = own ? since(began) / own : 0;
        saved_ += each * (pieces - own);
        wait(static_cast<int32_t>(pieces - own), SPIN + each);
    }

  private:
    struct Stage {
        void (*run)(const void* work, int64_t first, int64_t stop);
        const void* work;
        int64_t total, piece;
        unsigned mode;  // the caller's way of rounding
    };
    struct alignas(64) Part {
        std::atomic<uint64_t> next{0};  // the next piece that nobody has taken, and (lower half) the end of the part
    };

    static Helpers*& instance() {
        static Helpers* all = new Helpers;  // never destroyed: they may outlive whoever would
        return all;
    }

    // Run pieces until there are none that nobody has taken; returns how many. Once a piece is taken its stage stays, as
    // it isn't over before the piece is done.
    int64_t take(int64_t first_part) {
        int64_t taken = 0;
        const int64_t parts = parts_count_.load(std::memory_order_relaxed);
        for (int64_t turn = 0; turn < parts; turn++) {
            std::atomic<uint64_t>& next = parts_[(first_part + turn) % parts].next;
            for (;;) {
                uint64_t found = next.load(std::memory_order_acquire);
                if (found >> 32 >= (found & UINT32_MAX)) break;
                if (!next.compare_exchange_weak(found, found + (uint64_t{1} << 32), std::memory_order_acq_rel)) continue;
                const int64_t first = static_cast<int64_t>(found >> 32) * stage_.piece;
                if (first_part) _mm_setcsr(stage_.mode);
                stage_.run(stage_.work, first, std::min(first + stage_.piece, stage_.total));
                taken++;
                if (!first_part) continue;
                finished_.fetch_add(1, std::memory_order_seq_cst);
                if (waiting_.load(std::memory_order_seq_cst)) futex_wake(finished_);
            }
        }
        return taken;
    }

    // Wait until helpers have done so many pieces: awake for some seconds, then asleep.
    void wait(int32_t pieces, double awake) {
        if (finished_.load(std::memory_order_acquire) == pieces) return;
        const Clock::time_point began = Clock::now();
        do {
            for (int i = 0; i < 16; i++) {
                _mm_pause();
                if (finished_.load(std::memory_order_acquire) == pieces) return;
            }
        } while (since(began) < awake);
        waiting_.store(1, std::memory_order_seq_cst);
        for (int32_t done; (done = finished_.load(std::memory_order_seq_cst)) != pieces;) futex_wait(finished_, done);
        waiting_.store(0, std::memory_order_relaxed);
        waited_ += since(began);
    }

    void help(int64_t number) {
        worker() = number;
        int32_t seen = 0;
        for (;;) {
            const Clock::time_point began = Clock::now();
            int32_t stage;
            while ((stage = stages_.load(std::memory_order_acquire)) == seen) {
                for (int i = 0; i < 16; i++) _mm_pause();
                if (since(began) < SPIN) continue;
                asleep_.store(1, std::memory_order_seq_cst);
                futex_wait(stages_, seen);
            }
            seen = stage;
            if (number < parts_count_.load(std::memory_order_relaxed)) take(number);
        }
    }

    bool start() {
        if (started_ + 1 >= MOST_THREADS) return false;
        sigset_t every, before;
        sigfillset(&every);  // signals are for the program's own threads
        pthread_sigmask(SIG_SETMASK, &every, &before);
        pthread_t thread;
        const bool made = !pthread_create(&thread, nullptr, [](void* number) -> void* {
            all().help(reinterpret_cast<int64_t>(number));
            return nullptr;
        }, reinterpret_cast<void*>(started_ + 1));
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (made) pthread_detach(thread), started_++;
        return made;
    }

    std::mutex in_use_;
    int64_t started_ = 0;
    double saved_ = 0, waited_ = 0;  // seconds of this pass
    Worth worth_;
    Stage stage_{};
    std::atomic<int64_t> parts_count_{1};
    Part parts_[MOST_THREADS];
    alignas(64) std::atomic<int32_t> stages_{0};   // how many there were
    alignas(64) std::atomic<int32_t> finished_{0};  // pieces of this stage that helpers have done
    alignas(64) std::atomic<int32_t> asleep_{0}, waiting_{0};  // whether a helper, or the calling thread, may be asleep
};

// What the threads of a pass share while it runs.
class Region {
  public:
    explicit Region(int64_t threads) : helped_(Helpers::all().claim(threads)) {}
    ~Region() {
        if (helped_) Helpers::all().release();
    }
    Region(const Region&) = delete;

    int64_t stage() const { return stage_; }  // the number of the present stage

    template <class Work>
    void share(int64_t total, int64_t piece, const Work& work) {
        stage_++;
        if (helped_ && total > piece && !Helpers::all().are_late()) return Helpers::all().share(total, piece, work);
        for (int64_t first = 0; first < total; first += piece) work(first, std::min(first + piece, total));
    }

  private:
    const bool helped_;
    int64_t stage_ = 0;
};

// Something that each thread of a pass has for itself, made when it first asks for it.
template <class Thing>
class Own {
  public:
    template <class... Given>
    Thing& mine(const Given&... given) {
        std::unique_ptr<Thing>& thing = things_[worker()];
        if (!thing) thing.reset(new Thing(given...));
        return *thing;
    }

  private:
    std::unique_ptr<Thing> things_[MOST_THREADS];  // a late helper of a larger pass may still join
};

}  // namespace eyas
