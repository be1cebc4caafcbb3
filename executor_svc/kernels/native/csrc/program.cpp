// Runs the calls that were written down, see program.h and program.py.
//
// The team's threads keep to their few microseconds of looking for work (team.h): the next op comes sooner, and where it
// does not, another process holds up the calling thread and has a use for this core.
#include "program.h"

namespace {

struct Call {
  void (*function)(const octavo::Word*);
  int64_t first_word;
};

}  // namespace

OCTAVO_EXPORT void octavo_run_program(const Call* calls, int64_t count, const octavo::Word* words) {
  for (int64_t i = 0; i < count; ++i) calls[i].function(words + calls[i].first_word);
}
