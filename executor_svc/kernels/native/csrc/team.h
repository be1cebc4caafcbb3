// The compute threads of one process, and how they share the work of an op.
//
// OpenMP would do, but two of its runtimes meet here (torch brings its own), each with threads that spin in the way of
// the other's. This team's threads look for work for a few microseconds, as the next op of a step comes at once, and then
// sleep: other services run on the same cores.
#pragma once

#include <cstdint>

// A function of the library's C interface.
#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {

using Work = void (*)(void* arguments);

// Run `work` on every thread that comes before it is done, and return when nobody works any more: a thread that another
// process holds up is not waited for unless it has begun. So `work` takes shares until none is left, and returns only
// then. Calls from several threads run one after the other.
void run_on_team(Work work, void* arguments);

// The same for anything that is called without arguments.
template <class F>
void on_team(const F& f) {
  run_on_team([](void* arguments) { (*static_cast<const F*>(arguments))(); },
              const_cast<void*>(static_cast<const void*>(&f)));
}

int team_size();
// Which of them the calling thread is: 0 for whoever calls.
int team_index();

}  // namespace octavo
