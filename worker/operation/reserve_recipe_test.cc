#include "worker/operation/reserve_recipe.h"

#include <set>
#include <string>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using google::protobuf::FieldDescriptor;

// Sets the field to a value that is not the default.
void SetSome(const FieldDescriptor& field, google::protobuf::Message* message) {
  const google::protobuf::Reflection& reflection = *message->GetReflection();
  const bool repeated = field.is_repeated();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      repeated ? reflection.AddMessage(message, &field)
               : reflection.MutableMessage(message, &field);
      return;
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection.SetString(message, &field, "x");
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(message, &field, true);
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.SetEnumValue(message, &field, 1);
    case FieldDescriptor::CPPTYPE_UINT32:
      return repeated ? reflection.AddUInt32(message, &field, 1)
                      : reflection.SetUInt32(message, &field, 1);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.SetUInt64(message, &field, 1);
    default:
      ADD_FAILURE() << "a type that the test does not know: " << field.name();
  }
}

TEST(ReserveRecipeTest, EveryFieldCountsExceptThoseOfTheRequest) {
  const std::set<std::string> of_request = {
      "operation_id", "with_timeline", "places",     "request_id",        "traceparent",
      "token",        "writers",       "inline_run", "run_when_uploaded", "prepare_only"};
  v1::Reserve plain;
  plain.set_generation(7);
  const std::string recipe = RecipeOf(plain);
  for (int i = 0; i < v1::Reserve::descriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *v1::Reserve::descriptor()->field(i);
    v1::Reserve other = plain;
    SetSome(field, &other);
    const std::string before = other.SerializeAsString();
    EXPECT_EQ(RecipeOf(other) == recipe, of_request.count(field.name()) > 0) << field.name();
    EXPECT_EQ(other.SerializeAsString(), before) << field.name();
  }
}

TEST(ReserveRecipeTest, OperationsWithResidualsAreNotKept) {
  v1::Reserve reserve;
  EXPECT_TRUE(MayBeKept(reserve));
  reserve.set_retain(true);
  EXPECT_FALSE(MayBeKept(reserve));
  reserve.set_retain(false);
  reserve.set_residual("7-1");
  EXPECT_FALSE(MayBeKept(reserve));
}

}  // namespace
}  // namespace ringattn::worker
