#include "common/schedule/schedule_table.h"

#include <type_traits>
#include <utility>

#include "common/schedule/all_gather.h"
#include "common/schedule/dilated.h"
#include "common/schedule/resident_keys.h"
#include "common/schedule/ring.h"
#include "common/schedule/ring_step_classes.h"
#include "common/schedule/single.h"

namespace ringattn {
namespace {

// Holds the route of one schedule, so that a row's two functions share its type.
template <typename Route>
class TypedRoute : public ScheduleRoute {
 public:
  explicit TypedRoute(Route route) : route_(std::move(route)) {}
  bool direct() const override { return route_.direct(); }
  const Route& get() const { return route_; }

 private:
  const Route route_;
};

template <auto kMakeRoute, auto kMakeProgram>
constexpr ScheduleEntry Row(const char* name) {
  using Route = std::invoke_result_t<decltype(kMakeRoute), const ScheduleContext&>;
  return {name,
          [](const ScheduleContext& context) -> std::unique_ptr<const ScheduleRoute> {
            return std::make_unique<TypedRoute<Route>>(kMakeRoute(context));
          },
          [](const ScheduleContext& context, const ScheduleRoute& route, int rank) {
            return kMakeProgram(context, static_cast<const TypedRoute<Route>&>(route).get(), rank);
          }};
}

template <typename Route, auto kFindClasses>
constexpr ScheduleEntry WithClasses(ScheduleEntry entry) {
  entry.find_classes = [](const ScheduleContext& context, const ScheduleRoute& route,
                          const std::vector<int>& host_of_rank) {
    return kFindClasses(context, static_cast<const TypedRoute<Route>&>(route).get(), host_of_rank);
  };
  return entry;
}

struct KindRow {
  ScheduleKind kind;
  ScheduleEntry entry;
};

constexpr KindRow kSchedules[] = {
    {ScheduleKind::kSingle, Row<MakeSingleRoute, MakeSingleProgram>("single")},
    {ScheduleKind::kRing,
     WithClasses<RingRoute, FindRingStepClasses>(Row<MakeRingRoute, MakeRingProgram>("ring"))},
    {ScheduleKind::kAllGather, Row<MakeGatherRoute, MakeAllGatherProgram>("all_gather")},
    {ScheduleKind::kPassQ, Row<MakePassQRoute, MakeResidentKeysProgram>("pass_q")},
    {ScheduleKind::kReplicatedQ,
     Row<MakeReplicatedQRoute, MakeResidentKeysProgram>("replicated_q")},
    {ScheduleKind::kDoubleRing, WithClasses<RingRoute, FindRingStepClasses>(
                                    Row<MakeRingRoute, MakeRingProgram>("double_ring"))},
};

constexpr ScheduleEntry kDilated = Row<MakeDilatedRoute, MakeDilatedProgram>("dilated");

}  // namespace

const ScheduleEntry* FindSchedule(ScheduleKind kind) {
  for (const KindRow& row : kSchedules) {
    if (row.kind == kind) return &row.entry;
  }
  return nullptr;
}

const ScheduleEntry& DilatedSchedule() { return kDilated; }

const char* ScheduleKindName(ScheduleKind kind) {
  const ScheduleEntry* entry = FindSchedule(kind);
  return entry == nullptr ? "unknown" : entry->name;
}

}  // namespace ringattn
