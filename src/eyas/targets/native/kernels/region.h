// The threads of a pass share its work a stage at a time: each thread that is free takes the next piece.
//
// Other processes want the cores too, so no work is reserved for a thread that isn't running. The calling thread runs the
// stages and does whatever no helper has begun; helpers join when they can, on other cores. The calling thread only waits
// for pieces that a helper has begun. It spins for as long as a piece of its own takes, then sleeps, so that the system can
// run the helper in its place. Stages run with helpers or without, whichever gets more done on the machine as it is.
//
// Which thread computes a piece doesn't matter to its result.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "vector.h"

namespace eyas {

constexpr int64_t MAX_THREADS = 256;
constexpr int64_t PIECE = 4;  // panels of experts that a thread takes at a time

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

inline double since(Clock::time_point began) { return Seconds(Clock::now() - began).count(); }

constexpr double SPIN = 30e-6;  // seconds to spin before sleeping: a helper without work, or (at least) the caller for helpers
constexpr double LATE = 8e-3;   // seconds of waiting to tolerate: a time slice or two of another process on a helper's core
constexpr double WHILE = 0.04;  // seconds of a pass after which the use of helpers is decided again

inline double seconds_of_this_thread() {  // CPU time
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline void futex_wait(std::atomic<int32_t>& word, int32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
inline void futex_wake(std::atomic<int32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// The number of this thread among the threads of its pass; the calling thread is 0.
inline int64_t& worker() {
    static thread_local int64_t number = 0;
    return number;
}

// Whether stages use helpers, decided by the work that gets done with them and without, in units of one thread's work. The
// better way runs for longer, and the other is tried now and then. Alone, one thread's work is the most there can be.
class Choice {
  public:
    bool helped() const { return helped_; }

    // Count stages that took `seconds` and did `work` seconds of one thread's work.
    void count(double work, double seconds) {
        work_ += work, seconds_ += seconds;
        if (seconds_ < (helped_ == better_ ? (helped_ ? LONG : LONGEST) : SHORT)) return;
        rate_[helped_] = work_ / seconds_;
        work_ = seconds_ = 0;
        better_ = rate_[true] > MARGIN * rate_[false];
        helped_ = helped_ != better_ ? better_ : !better_ || rate_[true] > QUIET;
    }

  private:
    static constexpr double SHORT = 0.04, LONG = 0.3, LONGEST = 0.4;  // seconds
    static constexpr double MARGIN = 1.1;  // the gain that helpers must bring: pieces take longer where memory is shared
    static constexpr double QUIET = 1.4;   // where helpers bring more, no other process competes: running alone isn't tried

    bool helped_ = true, better_ = true;
    double rate_[2] = {1, 2}, work_ = 0, seconds_ = 0;
};

// The helper threads of this process. One pass has them at a time; a pass that starts meanwhile runs alone.
class Helpers {
  public:
    static Helpers& all() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { instance() = new Helpers; });
        (void)registered;
        return *instance();
    }

    // Begin a pass with `threads` threads. False while another pass has the helpers.
    bool claim(int64_t threads) {
        if (!in_use_.try_lock()) return false;
        threads_ = threads;
        begin();
        return true;
    }

    void release() {
        count();
        in_use_.unlock();
    }

    // Run `work(first, stop)` on pieces of `total` until all are done. Each thread begins with a part of its own, in order, so
    // that what a product prefetches is what the same thread works on next. If waiting for helpers has taken longer than they
    // saved, stages run without them for a while.
    template <class Work>
    void share(int64_t total, int64_t piece, const Work& work) {
        Clock::time_point began = Clock::now();
        if (Seconds(began - began_).count() > WHILE) {  // a long pass
            count();
            begin();
            began = began_;
        }
        if (parts_count_ == 1 || (waited_ > LATE && waited_ > saved_)) {
            for (int64_t first = 0; first < total; first += piece) work(first, std::min(first + piece, total));
            own_ += since(began);
            return;
        }
        const int64_t pieces = (total + piece - 1) / piece;
        stage_ = {[](const void* of, int64_t first, int64_t stop) { (*static_cast<const Work*>(of))(first, stop); }, &work,
                  total, piece, _mm_getcsr()};
        finished_.store(0, std::memory_order_relaxed);
        cpu_.store(sched_getcpu(), std::memory_order_relaxed);
        for (int64_t part = 0; part < parts_count_; part++) {
            const uint64_t begin = pieces * part / parts_count_, end = pieces * (part + 1) / parts_count_;
            parts_[part].next.store(begin << 32 | end, std::memory_order_release);
        }
        stages_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) && asleep_.exchange(0)) futex_wake(stages_);
        const int64_t own = take(0);
        const double taken = since(began), each = own ? taken / own : 0;
        own_ += taken, saved_ += each * (pieces - own);
        wait(static_cast<int32_t>(pieces - own), SPIN + each);
    }

  private:
    struct Stage {
        void (*run)(const void* work, int64_t first, int64_t stop);
        const void* work;
        int64_t total, piece;
        unsigned mode;  // the caller's MXCSR register
    };
    struct alignas(64) Part {
        std::atomic<uint64_t> next{0};  // the next piece that nobody has taken; in the lower half, the end of the part
    };

    // Start to count stages, with helpers or without.
    void begin() {
        if (choice_.helped())
            while (started_ < threads_ - 1 && start()) {
            }
        parts_count_ = choice_.helped() ? std::min(threads_, started_ + 1) : 1;
        own_ = saved_ = idle_ = waited_ = 0;
        began_ = Clock::now(), running_ = seconds_of_this_thread();
    }

    // Count the stages since `begin`.
    void count() {
        const double work = (seconds_of_this_thread() - running_ - idle_) * (own_ > 0 ? 1 + saved_ / own_ : 1);
        if (started_) choice_.count(work, since(began_));
    }

    static Helpers*& instance() {
        static Helpers* all = new Helpers;  // never destroyed: helper threads may outlive static destructors
        return all;
    }

    // Run pieces until all are taken; returns the number run here. While a taken piece isn't done, its stage isn't over, so
    // `stage_` doesn't change.
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

    // Wait until helpers have done `pieces` pieces: spin for `awake` seconds, then sleep.
    void wait(int32_t pieces, double awake) {
        if (finished_.load(std::memory_order_acquire) == pieces) return;
        const Clock::time_point began = Clock::now();
        do {
            for (int i = 0; i < 16; i++) {
                _mm_pause();
                if (finished_.load(std::memory_order_acquire) == pieces) {
                    idle_ += since(began);
                    return;
                }
            }
        } while (since(began) < awake);
        idle_ += since(began);
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
            if (number >= parts_count_.load(std::memory_order_relaxed)) continue;
            if (const int core = cpu_.load(std::memory_order_relaxed); sched_getcpu() == core) leave(core);
            take(number);
        }
    }

    // Move this helper off a core, if it may run on another one.
    static void leave(int core) {
        cpu_set_t allowed;
        if (sched_getaffinity(getpid(), sizeof(allowed), &allowed)) return;
        CPU_CLR(core, &allowed);
        if (CPU_COUNT(&allowed)) sched_setaffinity(0, sizeof(allowed), &allowed);
    }

    bool start() {
        if (started_ + 1 >= MAX_THREADS) return false;
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
    int64_t started_ = 0, threads_ = 1;  // helpers started; the most threads of this pass
    Choice choice_;
    // Of the stages being counted: when they began, and this thread's CPU time then; the seconds that its own pieces took,
    // that the helpers' pieces would have taken it, and that it waited for helpers: spinning (`idle_`), and in all where it
    // had to sleep (`waited_`).
    Clock::time_point began_;
    double running_ = 0, own_ = 0, saved_ = 0, idle_ = 0, waited_ = 0;
    std::atomic<int> cpu_{-1};  // the calling thread's core
    Stage stage_{};
    std::atomic<int64_t> parts_count_{1};
    Part parts_[MAX_THREADS];
    alignas(64) std::atomic<int32_t> stages_{0};   // how many there have been
    alignas(64) std::atomic<int32_t> finished_{0};  // pieces of this stage that helpers have done
    alignas(64) std::atomic<int32_t> asleep_{0}, waiting_{0};  // whether a helper, or the calling thread, may be asleep
};

// What the threads of a pass share while it runs.
class Region {
  public:
    explicit Region(int64_t threads) : claimed_(threads > 1 && Helpers::all().claim(threads)) {}
    ~Region() {
        if (claimed_) Helpers::all().release();
    }
    Region(const Region&) = delete;

    int64_t stage() const { return stage_; }  // the number of the current stage

    template <class Work>
    void share(int64_t total, int64_t piece, const Work& work) {
        stage_++;
        if (claimed_ && total > piece) return Helpers::all().share(total, piece, work);
        for (int64_t first = 0; first < total; first += piece) work(first, std::min(first + piece, total));
    }

  private:
    const bool claimed_;
    int64_t stage_ = 0;
};

// An object that each thread of a pass has for itself, made when the thread first asks for it.
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
    std::unique_ptr<Thing> things_[MAX_THREADS];  // a late helper of a larger pass may still join
};

}  // namespace eyas
