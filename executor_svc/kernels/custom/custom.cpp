// The team's threads, for custom operators that are compiled by themselves: see octavo_op.h.
#include "../native/csrc/team.h"

OCTAVO_EXPORT void octavo_run_on_team(octavo::Work work, void* arguments) { octavo::run_on_team(work, arguments); }
OCTAVO_EXPORT int octavo_team_size() { return octavo::team_size(); }
OCTAVO_EXPORT int octavo_team_index() { return octavo::team_index(); }
