#include "server/core/ring/reachable_set.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace ringattn::server {
namespace {

// Bron and Kerbosch's search for maximal cliques, with pivots.
class CliqueSearch {
 public:
  explicit CliqueSearch(const std::vector<ReachVertex>& vertices) : vertices_(vertices) {}

  std::vector<int> Run() {
    std::vector<int> all(vertices_.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    Visit({}, all, {});
    std::sort(best_.begin(), best_.end());
    return best_;
  }

 private:
  bool Reach(int a, int b) const { return vertices_[a].reaches[b]; }

  std::vector<int> Neighbours(const std::vector<int>& of, int vertex) const {
    std::vector<int> found;
    for (int other : of) {
      if (other != vertex && Reach(vertex, other)) found.push_back(other);
    }
    return found;
  }

  // `chosen` is a clique, `open` may extend it, and `done` has been tried.
  void Visit(const std::vector<int>& chosen, std::vector<int> open, std::vector<int> done) {
    if (open.empty() && done.empty()) return Consider(chosen);
    // The first descent always completes, so there is a result.
    if (++visits_ > kMaxVisits && !best_.empty()) return;
    int pivot = -1;
    size_t most = 0;
    for (const std::vector<int>* candidates : {&open, &done}) {
      for (int candidate : *candidates) {
        const size_t count = Neighbours(open, candidate).size();
        if (pivot < 0 || count > most) {
          pivot = candidate;
          most = count;
        }
      }
    }
    std::vector<int> branches;
    for (int vertex : open) {
      if (vertex == pivot || !Reach(pivot, vertex)) branches.push_back(vertex);
    }
    for (int vertex : branches) {
      std::vector<int> extended = chosen;
      extended.push_back(vertex);
      Visit(extended, Neighbours(open, vertex), Neighbours(done, vertex));
      open.erase(std::find(open.begin(), open.end(), vertex));
      done.push_back(vertex);
    }
  }

  void Consider(const std::vector<int>& clique) {
    std::set<std::string> hosts;
    uint64_t memory = 0;
    int workers = 0;
    std::string lowest;
    for (int vertex : clique) {
      const ReachVertex& v = vertices_[vertex];
      hosts.insert(v.host);
      memory += v.memory_bytes;
      workers += v.workers;
      if (lowest.empty() || v.lowest_name < lowest) lowest = v.lowest_name;
    }
    const Rank rank{hosts.size(), memory, workers};
    if (!best_.empty() && std::tie(rank, best_lowest_) <= std::tie(best_rank_, lowest)) return;
    best_ = clique;
    best_rank_ = rank;
    best_lowest_ = lowest;
  }

  using Rank = std::tuple<size_t, uint64_t, int>;

  const std::vector<ReachVertex>& vertices_;
  std::vector<int> best_;
  Rank best_rank_;
  std::string best_lowest_;
  int visits_ = 0;
};

}  // namespace

std::vector<int> LargestReachableSet(const std::vector<ReachVertex>& vertices) {
  return CliqueSearch(vertices).Run();
}

}  // namespace ringattn::server
