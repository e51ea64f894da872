#include "worker/operation/reserve_recipe.h"

#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace ringattn::worker {
namespace {

// Fields that concern the single request: its names, where its tensors are, and when it runs.
const std::vector<const google::protobuf::FieldDescriptor*>& RequestFields() {
  static const auto* const fields = [] {
    auto* made = new std::vector<const google::protobuf::FieldDescriptor*>();
    for (int number : {
             v1::Reserve::kOperationIdFieldNumber,
             v1::Reserve::kWithTimelineFieldNumber,
             v1::Reserve::kPlacesFieldNumber,
             v1::Reserve::kRequestIdFieldNumber,
             v1::Reserve::kTraceparentFieldNumber,
             v1::Reserve::kTokenFieldNumber,
             v1::Reserve::kWritersFieldNumber,
             v1::Reserve::kInlineRunFieldNumber,
             v1::Reserve::kRunWhenUploadedFieldNumber,
             v1::Reserve::kPrepareOnlyFieldNumber,
         }) {
      made->push_back(v1::Reserve::descriptor()->FindFieldByNumber(number));
    }
    return made;
  }();
  return *fields;
}

}  // namespace

bool MayBeKept(const v1::Reserve& reserve) {
  return !reserve.retain() && reserve.residual().empty();
}

bool MayBePreparedOnly(const v1::Reserve& reserve) {
  return MayBeKept(reserve) && reserve.places().empty() && reserve.token().empty() &&
         !reserve.has_inline_run() && !reserve.has_run_when_uploaded();
}

std::string RecipeOf(v1::Reserve& reserve) {
  v1::Reserve request;
  const google::protobuf::Reflection& reflection = *v1::Reserve::GetReflection();
  reflection.SwapFields(&reserve, &request, RequestFields());
  std::string recipe = reserve.SerializeAsString();
  reflection.SwapFields(&reserve, &request, RequestFields());
  return recipe;
}

}  // namespace ringattn::worker
