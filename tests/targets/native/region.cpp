// Passes of many stages whose helpers start pieces late, hold them long or never start, against one thread's results.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

static const char* disturbance = "";
static bool is(const char* name) { return !std::strcmp(disturbance, name); }

static int made_late(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* given) {
    if (is("none")) return 11;
    static void* (*begin)(void*) = nullptr;
    begin = run;
    auto asleep = [](void* what) -> void* {
        if (is("asleep")) std::this_thread::sleep_for(std::chrono::hours(1));
        return begin(what);
    };
    return pthread_create(thread, attributes, asleep, given);
}
#define pthread_create made_late
#include "region.h"

using namespace eyas;

// Each stage reads the previous stage's output and writes to another buffer, as the stages of a real pass do.
static void pass(int64_t threads, int64_t stages, std::vector<uint64_t>& out) {
    constexpr int64_t SIZE = 97;
    std::vector<uint64_t> from(SIZE, 1), to(SIZE);
    Region region(threads);
    Own<std::vector<uint64_t>> rooms;
    for (int64_t stage = 0; stage < stages; stage++) {
        const int64_t piece = 1 + stage % 5, total = SIZE - stage % 7 * 13;
        region.share(total, piece, [&](int64_t first, int64_t stop) {
            std::vector<uint64_t>& room = rooms.mine(SIZE);
            if (is("slow") && worker() && stage % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
            if (is("yielding") && (stage + first) % 11 == 0) std::this_thread::yield();
            for (int64_t i = first; i < stop; i++) room[i] = from[i] * 6364136223846793005u + from[(i + stage) % SIZE];
            for (int64_t i = first; i < stop; i++) to[i] = room[i] + region.stage();
        });
        for (int64_t i = total; i < SIZE; i++) to[i] = from[i];
        std::swap(from, to);
    }
    out = from;
}

// Whether helpers are tried again after a period in which they slowed passes down, and kept once they speed them up.
static bool choice_follows() {
    Choice choice;
    int helped[3] = {};
    for (int moment = 0; moment < 3; moment++)  // idle, busy, idle
        for (int i = 0; i < 300; i++) {
            helped[moment] += choice.helped();
            choice.count(choice.helped() ? (moment == 1 ? 0.007 : 0.019) : 0.0098, 0.01);
        }
    std::printf("with helpers %d, %d, %d of 300\n", helped[0], helped[1], helped[2]);
    return helped[0] == 300 && helped[1] > 0 && helped[1] < 90 && helped[2] > 240;
}

// Whether a long pass that begins without helpers gets them back before it ends.
static bool helpers_come_back() {
    std::atomic<int> helped{0};
    auto pass_of = [&](double seconds) {
        helped = 0;
        Region region(2);
        for (const Clock::time_point began = Clock::now(); since(began) < seconds;)
            region.share(64, 1, [&](int64_t, int64_t) {
                for (const Clock::time_point own = Clock::now(); since(own) < 20e-6;) {
                }
                if (!worker()) return;
                helped++;
                if (is("slow")) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            });
    };
    disturbance = "slow";
    int tried = 0;
    do pass_of(0.05);
    while (helped && ++tried < 100);
    disturbance = "calm";
    pass_of(1.5);
    std::printf("alone after %d passes, then %d pieces by a helper\n", tried, helped.load());
    return tried < 100 && helped > 0;
}

int main(int, char** arguments) {
    disturbance = arguments[1];
    if (is("choice")) return !choice_follows();
    if (is("long")) return !helpers_come_back();
    const int64_t passes = std::atoi(arguments[2]);
    std::vector<uint64_t> expected, found;
    pass(1, 200, expected);
    for (int64_t i = 0; i < passes; i++) {
        pass(1 + i % 5, 200, found);
        if (found != expected) return std::printf("pass %d with %d threads differs\n", int(i), int(1 + i % 5)), 1;
    }
    bool same = true, others = true;  // two callers: one of them has the helpers
    std::thread other([&] {
        std::vector<uint64_t> own;
        for (int64_t i = 0; i < passes / 4; i++) pass(3, 200, own), others = others && own == expected;
    });
    for (int64_t i = 0; i < passes / 4; i++) pass(3, 200, found), same = same && found == expected;
    other.join();
    same = same && others;
    std::puts(same ? "same" : "passes of two callers differ");
    std::fflush(stdout);
    _exit(same ? 0 : 1);  // helpers may be asleep
}
