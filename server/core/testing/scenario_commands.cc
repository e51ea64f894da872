#include "server/core/testing/scenario_commands.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/core/testing/scenario_kv.h"

namespace ringattn::server {

std::optional<ScenarioCommand> CommandOf(const v1::JoinResponse& message) {
  ScenarioCommand command;
  command.answer.emplace();
  switch (message.message_case()) {
    case v1::JoinResponse::kExpectRegion:
    case v1::JoinResponse::kForgetRegion:
    case v1::JoinResponse::kRegistered:
      return std::nullopt;
    case v1::JoinResponse::kPrepare:
      command.text = absl::StrCat("prepare ", message.prepare().generation(), " rank ",
                                  message.prepare().rank(), " of ", message.prepare().world_size());
      command.answer->mutable_prepared()->set_generation(message.prepare().generation());
      break;
    case v1::JoinResponse::kCommit:
      command.text = absl::StrCat("commit ", message.commit().generation(), " [",
                                  absl::StrJoin(message.commit().blobs(), " "), "]");
      if (message.commit().hosts_size() > 0) {
        absl::StrAppend(&command.text, " hosts ", absl::StrJoin(message.commit().hosts(), " "));
      }
      command.answer->mutable_committed()->set_generation(message.commit().generation());
      break;
    case v1::JoinResponse::kTeardown:
      command.text = absl::StrCat("teardown ", message.teardown().generation());
      command.answer->mutable_torn_down()->set_generation(message.teardown().generation());
      break;
    case v1::JoinResponse::kRelease:
      command.text = absl::StrCat("release ", message.release().operation_id(),
                                  message.release().keep_residual() ? " keeping" : "");
      command.answer->mutable_released()->set_operation_id(message.release().operation_id());
      command.answer->mutable_released()->set_generation(message.release().generation());
      break;
    case v1::JoinResponse::kReserve:
      command.text = absl::StrCat("reserve ", message.reserve().operation_id(), " [",
                                  absl::StrJoin(message.reserve().members(), " "), "]",
                                  message.reserve().retain() ? " retain" : "",
                                  message.reserve().residual().empty() ? "" : " reads ",
                                  message.reserve().residual());
      if (message.reserve().has_prepare_only()) absl::StrAppend(&command.text, " prepare only");
      if (message.reserve().has_inline_run()) {
        const v1::InlineRun& run = message.reserve().inline_run();
        absl::StrAppend(&command.text, " inline ",
                        run.inputs().empty() ? "in memory" : run.inputs(0).data(),
                        run.has_preempt_after() ? " preempting" : "");
      }
      if (message.reserve().has_run_when_uploaded()) {
        absl::StrAppend(
            &command.text, " run when uploaded",
            message.reserve().run_when_uploaded().has_preempt_after() ? " preempting" : "");
      }
      command.answer.reset();
      break;
    case v1::JoinResponse::kRun:
      command.text = absl::StrCat("run ", message.run().operation_id(),
                                  message.run().has_preempt_after() ? " preempting" : "");
      command.answer.reset();
      break;
    case v1::JoinResponse::kProbe:
      command.text = absl::StrCat("probe ", message.probe().id(), " of ",
                                  absl::StrJoin(message.probe().addresses(), " "));
      command.answer->mutable_probed()->set_id(message.probe().id());
      break;
    case v1::JoinResponse::kCancel:
      command.text = absl::StrCat("cancel ", message.cancel().operation_id());
      command.answer.reset();
      break;
    case v1::JoinResponse::kLosePeer:
      command.text = absl::StrCat("lose rank ", message.lose_peer().rank());
      command.answer.reset();
      break;
    case v1::JoinResponse::kDropResiduals:
      command.text =
          absl::StrCat("drop ", absl::StrJoin(message.drop_residuals().operation_ids(), " "));
      command.answer.reset();
      break;
    case v1::JoinResponse::kKvReserve:
    case v1::JoinResponse::kKvOpen:
    case v1::JoinResponse::kKvSettle:
    case v1::JoinResponse::kKvFree:
      command.text = KvCommandText(message);
      command.answer.reset();
      break;
    case v1::JoinResponse::kLeave:
      command.text = absl::StrCat("leave: ", message.leave().reason());
      command.answer.reset();
      break;
    case v1::JoinResponse::MESSAGE_NOT_SET:
      std::abort();
  }
  return command;
}

}  // namespace ringattn::server
