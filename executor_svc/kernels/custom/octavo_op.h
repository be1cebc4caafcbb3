// For the source of a custom operator in C++: vectors (simd.h, lanes.h), the team's threads (share_rows) and programs.
//
// Include it once, in a library's only source. Functions are declared OCTAVO_EXPORT; those named in OCTAVO_IN_PROGRAMS
// may be part of recorded steps.
#pragma once

#include "../native/csrc/lanes.h"
#include "../native/csrc/program.h"

namespace octavo {
namespace joined {

inline void (*run)(Work, void*) = nullptr;
inline int (*size)() = nullptr;
inline int (*index)() = nullptr;

}  // namespace joined

// The threads are those of Octavo's own kernels.
void run_on_team(Work work, void* arguments) { joined::run(work, arguments); }
int team_size() { return joined::size(); }
int team_index() { return joined::index(); }

}  // namespace octavo

OCTAVO_EXPORT void octavo_op_join(void* run, void* size, void* index) {
  octavo::joined::run = reinterpret_cast<void (*)(octavo::Work, void*)>(run);
  octavo::joined::size = reinterpret_cast<int (*)()>(size);
  octavo::joined::index = reinterpret_cast<int (*)()>(index);
}
