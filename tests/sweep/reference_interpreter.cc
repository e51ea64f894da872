#include "tests/sweep/reference_interpreter.h"

#include <algorithm>
#include <string>

#include "common/program/lane_check.h"
#include "tests/sweep/reference_bind.h"

namespace ringattn::tests {
namespace {

class Interpreter {
 public:
  Interpreter(const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
              const Kernels& kernels, Cut cut)
      : world_size_(plan.world_size),
        schedule_(schedule),
        kernels_(kernels),
        problems_(spec, plan, schedule, cut),
        memory_(spec, plan, schedule) {}

  absl::StatusOr<TensorMap> Run(const TensorMap& inputs) {
    if (static_cast<int>(schedule_.programs.size()) != world_size_) {
      return absl::InternalError("the schedule has not one program per rank");
    }
    const std::string violation = CheckLanes(schedule_.programs);
    if (!violation.empty()) return absl::InternalError(violation);
    if (absl::Status status = memory_.Allocate(inputs); !status.ok()) return status;
    size_t steps = 0;
    for (const Program& program : schedule_.programs) steps = std::max(steps, program.steps.size());
    for (size_t step = 0; step < steps; ++step) {
      absl::Status status = memory_.Exchange(step);
      for (int rank = 0; rank < world_size_ && status.ok(); ++rank) {
        status = Compute(rank, step);
      }
      if (!status.ok()) return status;
    }
    return memory_.Collect(steps);
  }

 private:
  absl::Status Compute(int rank, size_t step) {
    const Program& program = schedule_.programs[rank];
    if (step >= program.steps.size()) return absl::OkStatus();
    for (const ComputeCall& call : program.steps[step].calls) {
      absl::StatusOr<KernelCall> bound =
          BindReference(problems_, memory_, store_, rank, step, call);
      if (!bound.ok()) return bound.status();
      if (absl::Status status = kernels_(*bound); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const int world_size_;
  const Schedule& schedule_;
  const Kernels& kernels_;
  const ReferenceProblems problems_;
  ReferenceMemory memory_;
  CallStore store_;
};

}  // namespace

absl::StatusOr<TensorMap> Interpret(const AttentionSpec& spec, const ShardPlan& plan,
                                    const Schedule& schedule, const TensorMap& inputs,
                                    const Kernels& kernels, Cut cut) {
  return Interpreter(spec, plan, schedule, kernels, cut).Run(inputs);
}

}  // namespace ringattn::tests
