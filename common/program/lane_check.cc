#include "common/program/lane_check.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/program/access.h"

namespace ringattn {
namespace {

std::string Violation(const Program& program, size_t step, const Transfer& transfer,
                      const std::string& what) {
  const bool sends = transfer.kind == Transfer::Kind::kSend;
  return absl::StrCat("rank ", program.rank, ", step ", step, ": the ",
                      sends ? "send to" : "receive from", " rank ", transfer.peer, " ", what);
}

// Returns the first access that conflicts with the transfer while it may be in flight.
std::string CheckInFlight(const Program& program, size_t begin, size_t index) {
  const Transfer& transfer = program.steps[begin].transfers[index];
  const Access own = AccessOf(transfer);
  const auto reused = [&](size_t step, const char* by) {
    return Violation(
        program, begin, transfer,
        absl::StrCat("may be in flight for ", transfer.steps, " steps, but ", by, " of step ", step,
                     " uses its bytes of buffer ", program.buffers[transfer.range.buffer].name));
  };
  const size_t end = begin + transfer.steps;
  for (size_t step = begin; step < end; ++step) {
    const Step& now = program.steps[step];
    for (size_t other = 0; other < now.transfers.size(); ++other) {
      if (step == begin && other == index) continue;
      if (Conflict(own, AccessOf(now.transfers[other]))) return reused(step, "a transfer");
    }
    if (step + 1 == end) break;
    for (const ComputeCall& call : now.calls) {
      if (Conflict({own}, AccessesOf(call))) return reused(step, "a call");
    }
  }
  return "";
}

std::string CheckTransfer(const Program& program, size_t step, size_t index) {
  const Transfer& transfer = program.steps[step].transfers[index];
  if (transfer.steps < 1 || (transfer.steps > 1 && transfer.lane == Lane::kInside)) {
    return Violation(
        program, step, transfer,
        absl::StrCat("may take ", transfer.steps,
                     " steps; 1 is accepted inside a host, and at least 1 between hosts"));
  }
  if (step + transfer.steps > program.steps.size()) {
    return Violation(program, step, transfer,
                     absl::StrCat("may take ", transfer.steps, " steps; the program has only ",
                                  program.steps.size()));
  }
  return transfer.lane == Lane::kBetween ? CheckInFlight(program, step, index) : "";
}

}  // namespace

std::string CheckLanes(const std::vector<Program>& programs) {
  std::map<std::pair<int, int>, Lane> lanes;  // by {lower rank, higher rank}
  // By {sender, receiver}: Transfer::steps of their transfers, in order.
  std::map<std::pair<int, int>, std::vector<int>> sent, received;
  for (const Program& program : programs) {
    for (size_t step = 0; step < program.steps.size(); ++step) {
      const std::vector<Transfer>& transfers = program.steps[step].transfers;
      for (size_t i = 0; i < transfers.size(); ++i) {
        const Transfer& transfer = transfers[i];
        const std::pair<int, int> pair = std::minmax({program.rank, transfer.peer});
        if (lanes.try_emplace(pair, transfer.lane).first->second != transfer.lane) {
          return Violation(program, step, transfer, "is in another lane than an earlier transfer");
        }
        const bool sends = transfer.kind == Transfer::Kind::kSend;
        (sends ? sent[{program.rank, transfer.peer}] : received[{transfer.peer, program.rank}])
            .push_back(transfer.steps);
        std::string violation = CheckTransfer(program, step, i);
        if (!violation.empty()) return violation;
      }
    }
  }
  for (const auto& [pair, steps] : sent) {
    const std::vector<int>& theirs = received[pair];
    const size_t count = std::min(steps.size(), theirs.size());
    if (std::equal(steps.begin(), steps.begin() + count, theirs.begin())) continue;
    return absl::StrCat("the sends of rank ", pair.first, " to rank ", pair.second,
                        " and their receives may take different numbers of steps");
  }
  return "";
}

std::vector<Transfer> EndingAt(const Program& program, size_t step) {
  std::vector<Transfer> ending;
  for (size_t begin = 0; begin <= step; ++begin) {
    for (const Transfer& transfer : program.steps[begin].transfers) {
      if (begin + transfer.steps - 1 == step) ending.push_back(transfer);
    }
  }
  return ending;
}

}  // namespace ringattn
