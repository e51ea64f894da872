#include "server/core/ring/rank_order.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

class RankOrderTest : public testing::Test {
 protected:
  v1::WorkerLocation& Add(const std::string& name, const std::string& host) {
    registrations_.emplace_back();
    registrations_.back().set_name(name);
    registrations_.back().mutable_location()->set_host(host);
    return *registrations_.back().mutable_location();
  }

  // Returns the names in the order of ranks, for workers that joined in any order.
  std::vector<std::string> Order() {
    std::vector<std::string> first;
    std::vector<size_t> joining(registrations_.size());
    for (size_t i = 0; i < joining.size(); ++i) joining[i] = i;
    do {
      Roster roster;
      std::vector<ConnectionId> workers;
      for (size_t i : joining) {
        workers.push_back(workers.size() + 1);
        roster.Add(workers.back(), registrations_[i], absl::UnixEpoch());
      }
      SortForRanks(roster, &workers);
      hosts_ = HostsOf(workers, roster);
      std::vector<std::string> names;
      for (ConnectionId worker : workers) names.push_back(roster.NameOf(worker));
      if (first.empty()) first = names;
      EXPECT_EQ(names, first);
    } while (std::next_permutation(joining.begin(), joining.end()));
    return first;
  }

  std::vector<v1::Register> registrations_;
  std::vector<int> hosts_;  // of the last Order()
};

using Names = std::vector<std::string>;

TEST_F(RankOrderTest, WorkersWithoutALocationFollowTheirNames) {
  Add("c", "");
  Add("a", "");
  Add("b", "");
  EXPECT_EQ(Order(), (Names{"a", "b", "c"}));
  EXPECT_EQ(hosts_, (std::vector<int>{0, 0, 0}));
}

TEST_F(RankOrderTest, WorkersOfAHostAreNeighbours) {
  Add("a", "y");
  Add("b", "x");
  Add("c", "y");
  Add("d", "x");
  EXPECT_EQ(Order(), (Names{"b", "d", "a", "c"}));
  EXPECT_EQ(hosts_, (std::vector<int>{0, 0, 1, 1}));
}

TEST_F(RankOrderTest, SlotsOrderTheWorkersOfAHost) {
  Add("a", "x").set_slot(2);
  Add("b", "x").set_slot(0);
  Add("c", "x");
  Add("d", "x").set_slot(uint64_t{1} << 40);
  EXPECT_EQ(Order(), (Names{"b", "a", "d", "c"}));
}

TEST_F(RankOrderTest, AnAcceleratorDomainJoinsHostsAndDividesThem) {
  // x has two domains, and y is in the first of them.
  Add("a", "x").set_accelerator_domain("n1");
  Add("b", "x").set_accelerator_domain("n3");
  Add("c", "y").set_accelerator_domain("n1");
  Add("d", "w").set_accelerator_domain("n2");
  EXPECT_EQ(Order(), (Names{"a", "b", "c", "d"}));
  EXPECT_EQ(hosts_, (std::vector<int>{0, 0, 1, 2}));
}

TEST_F(RankOrderTest, ZonesComeFirst) {
  Add("a", "x").set_zone("z2");
  Add("b", "y").set_zone("z1");
  Add("c", "z").set_zone("z2");
  // Workers of one host that report two zones stay together.
  Add("d", "y").set_zone("z3");
  EXPECT_EQ(Order(), (Names{"b", "d", "a", "c"}));
}

}  // namespace
}  // namespace ringattn::server
