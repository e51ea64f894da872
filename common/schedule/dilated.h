// The program of dilated attention. It runs level by level. Within a level, the programs of all its
// parts (common/layout/dilation.h) run concurrently between two copies; each is the program of a
// separate request. A gather before them copies the parts' inputs. One call after them merges their
// results into, or adds them to, the whole's results. The first level initialises the partial or
// the sum; the last level writes the results.
//
// A part with all tokens and heads (rate 1) reads the whole's inputs in place. If it is the first
// part, it also writes the partial or sum that later results are merged into or added to. Works
// with every schedule; ranks exchange the selected tokens and heads of all parts of a level at
// once.
//
// All levels use the same buffers.
#ifndef RINGATTN_COMMON_SCHEDULE_DILATED_H_
#define RINGATTN_COMMON_SCHEDULE_DILATED_H_

#include <memory>
#include <vector>

#include "common/layout/dilation.h"
#include "common/program/program.h"
#include "common/schedule/schedule.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

// The part of the schedule that all ranks share. Not copied, because builders refer to the parts.
struct DilatedRoute {
  std::vector<DilatedPart> parts;
  // By part; empty if the program has no such pass.
  std::vector<std::unique_ptr<ScheduleBuilder>> forward;
  std::vector<std::unique_ptr<ScheduleBuilder>> backward;

  bool direct() const;  // whether any part is direct
};

DilatedRoute MakeDilatedRoute(const ScheduleContext& context);

Program MakeDilatedProgram(const ScheduleContext& context, const DilatedRoute& route, int rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_DILATED_H_
