#include "server/core/ring/reachability.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/wire/durations.h"
#include "server/core/ring/reachable_set.h"

namespace ringattn::server {

Reachability::Reachability(const CoordinatorConfig* config, const Roster* roster,
                           ActionBatch* batch)
    : config_(*config), roster_(*roster), batch_(*batch) {}

// ------------------------------------------------------------------------ cuts

LinkEnd Reachability::EndOf(ConnectionId worker) const {
  const v1::Register& registration = roster_.at(worker).registration;
  const std::string& host = registration.location().host();
  return host.empty() ? LinkEnd{"", registration.name()} : LinkEnd{host, ""};
}

bool Reachability::IsCut(ConnectionId a, ConnectionId b) const {
  const auto is_open = [this](const LinkEnd& one, const LinkEnd& other) {
    const auto found = cuts_.find(std::minmax(one, other));
    return found != cuts_.end() && found->second.open;
  };
  return is_open(EndOf(a), EndOf(b)) || is_open({"", roster_.NameOf(a)}, {"", roster_.NameOf(b)});
}

void Reachability::OnUnreached(ConnectionId reporter, const std::vector<ConnectionId>& unreached,
                               const std::string& reason) {
  for (ConnectionId peer : unreached) {
    if (peer == reporter || !roster_.Has(peer) || !roster_.Has(reporter)) continue;
    const LinkEnd from = EndOf(reporter), to = EndOf(peer);
    const std::string detail = roster_.NameOf(reporter) + " cannot reach " + roster_.NameOf(peer) +
                               (reason.empty() ? "" : ": " + reason);
    unexplained_ = 0;
    // A fault inside a host is one of the two workers.
    if (from == to || from.host.empty() || to.host.empty()) {
      Open({"", roster_.NameOf(reporter)}, {"", roster_.NameOf(peer)}, detail);
    } else {
      Open(from, to, detail);
    }
  }
}

std::set<LinkEnd> Reachability::EndsOf(const std::vector<ConnectionId>& members) const {
  std::set<LinkEnd> ends;
  for (ConnectionId member : members) {
    if (roster_.Has(member)) ends.insert(EndOf(member));
  }
  return ends;
}

void Reachability::Suspect(const std::vector<ConnectionId>& members) {
  const std::set<LinkEnd> ends = EndsOf(members);
  for (auto a = ends.begin(); a != ends.end(); ++a) {
    for (auto b = std::next(a); b != ends.end(); ++b) {
      Cut& cut = cuts_[{*a, *b}];
      if (cut.open || cut.suspected) continue;
      cut.suspected = true;
      ++suspected_;
    }
  }
}

void Reachability::OnUnexplained(const std::vector<ConnectionId>& members) {
  const std::set<LinkEnd> ends = EndsOf(members);
  if (ends.size() < 2 || ++unexplained_ < kUnexplainedFormings) return;
  unexplained_ = 0;
  for (const LinkEnd& a : ends) {
    for (const LinkEnd& b : ends) {
      if (a < b) Open(a, b, "rings over both failed to form for an unknown reason");
    }
  }
}

void Reachability::Open(const LinkEnd& a, const LinkEnd& b, const std::string& reason) {
  Forget();
  Cut& cut = cuts_[std::minmax(a, b)];
  if (cut.open) return;
  const absl::Time now = batch_.now();
  cut.open = true;
  cut.failed_at = now;
  absl::Duration delay = config_.probe_interval;
  for (int i = 0; i < cut.failures && delay < config_.parted_retry_max; ++i) delay *= 2;
  ++cut.failures;
  cut.due = now + std::min(delay, config_.parted_retry_max);
  ++open_cuts_;
  changed_ = true;
  cached_ = false;
  batch_.Emit(ReachChanged{now, a.name(), b.name(), /*reached=*/false, reason});
}

void Reachability::Close(const Pair& pair, Cut* cut) {
  cut->open = false;
  --open_cuts_;
  changed_ = true;
  cached_ = false;
  batch_.Emit(ReachChanged{batch_.now(), pair.first.name(), pair.second.name(), /*reached=*/true,
                           "they reach each other"});
}

void Reachability::OnFormed(const std::vector<ConnectionId>& members) {
  unexplained_ = 0;
  if (cuts_.empty()) return;
  std::set<LinkEnd> ends;
  for (ConnectionId member : members) {
    if (!roster_.Has(member)) continue;
    ends.insert(EndOf(member));
    ends.insert({"", roster_.NameOf(member)});
  }
  for (auto cut = cuts_.begin(); cut != cuts_.end();) {
    const bool formed = !cut->second.open && !cut->second.suspected &&
                        ends.count(cut->first.first) > 0 && ends.count(cut->first.second) > 0;
    cut = formed ? cuts_.erase(cut) : std::next(cut);
  }
}

void Reachability::Forget() {
  for (auto cut = cuts_.begin(); cut != cuts_.end();) {
    const auto& [pair, state] = *cut;
    if (state.suspected) {
      ++cut;
      continue;
    }
    const bool absent = WorkersAt(pair.first).empty() || WorkersAt(pair.second).empty();
    const bool old = batch_.now() - state.failed_at > kMemory && (!state.open || absent);
    if (old && state.open) {
      --open_cuts_;
      cached_ = false;
    }
    cut = old ? cuts_.erase(cut) : std::next(cut);
  }
}

void Reachability::Forgive(absl::Duration pause) {
  for (auto& [pair, cut] : cuts_) {
    cut.due += pause;
    cut.failed_at += pause;
  }
  round_ends_ += pause;
}

// ---------------------------------------------------------------------- probes

std::vector<ConnectionId> Reachability::WorkersAt(const LinkEnd& place) const {
  std::vector<ConnectionId> workers;
  for (const auto& [connection, worker] : roster_.workers()) {
    if (worker.leaving) continue;
    const bool is_here = place.worker.empty() ? worker.registration.location().host() == place.host
                                              : worker.registration.name() == place.worker;
    if (is_here) workers.push_back(connection);
  }
  return workers;
}

void Reachability::Advance() {
  if (!sent_.empty() && batch_.now() >= round_ends_) EndRound();
  if (sent_.empty() && (open_cuts_ > 0 || suspected_ > 0)) StartRound();
}

void Reachability::StartRound() {
  const absl::Time now = batch_.now();
  std::map<ConnectionId, SentProbe> probes;
  std::map<ConnectionId, std::vector<std::string>> addresses;
  for (auto& [pair, cut] : cuts_) {
    if (!cut.suspected && (!cut.open || cut.due > now)) continue;
    cut.answered = cut.passed = 0;
    probed_.insert(pair);
    const std::vector<ConnectionId> a = WorkersAt(pair.first), b = WorkersAt(pair.second);
    if (a.empty() || b.empty()) continue;
    const ConnectionId one = a[cut.probes % a.size()], other = b[cut.probes % b.size()];
    ++cut.probes;
    for (const auto& [prober, target] : {std::pair(one, other), std::pair(other, one)}) {
      const std::string& address = roster_.at(target).registration.probe_address();
      // A worker that cannot be probed counts as reached: the delay above bounds what that costs.
      if (address.empty()) {
        ++cut.answered;
        ++cut.passed;
        continue;
      }
      SentProbe& probe = probes[prober];
      probe.prober = prober;
      probe.pairs.push_back(pair);
      addresses[prober].push_back(address);
    }
  }
  for (auto& [prober, probe] : probes) {
    v1::Probe* message = batch_.Send(prober)->mutable_probe();
    message->set_id(++last_probe_);
    for (const std::string& address : addresses[prober]) message->add_addresses(address);
    SetDuration(config_.probe_timeout, message->mutable_timeout());
    sent_.emplace(last_probe_, std::move(probe));
  }
  round_ends_ = now + 2 * config_.probe_timeout;
  if (sent_.empty() && !probed_.empty()) EndRound();
}

void Reachability::OnProbed(ConnectionId connection, const v1::Probed& probed) {
  const auto sent = sent_.find(probed.id());
  if (sent == sent_.end() || sent->second.prober != connection) return;
  const std::set<uint32_t> unreached(probed.unreached().begin(), probed.unreached().end());
  for (size_t i = 0; i < sent->second.pairs.size(); ++i) {
    const auto cut = cuts_.find(sent->second.pairs[i]);
    if (cut == cuts_.end()) continue;
    ++cut->second.answered;
    if (unreached.count(static_cast<uint32_t>(i)) == 0) ++cut->second.passed;
  }
  sent_.erase(sent);
  if (sent_.empty()) EndRound();
}

void Reachability::EndRound() {
  sent_.clear();
  for (const Pair& pair : std::exchange(probed_, {})) {
    const auto cut = cuts_.find(pair);
    if (cut == cuts_.end()) continue;
    if (cut->second.suspected) {
      Judge(pair);
      continue;
    }
    if (!cut->second.open) continue;
    // Each end has reached the other.
    if (cut->second.passed == 2) {
      Close(pair, &cut->second);
    } else {
      cut->second.due = batch_.now() + config_.probe_interval;
    }
  }
}

// Ends the suspicion against the pair.
void Reachability::Judge(const Pair& pair) {
  const auto cut = cuts_.find(pair);
  cut->second.suspected = false;
  --suspected_;
  // A worker that does not answer says nothing about the link.
  if (cut->second.answered == 2 && cut->second.passed < 2) {
    return Open(pair.first, pair.second, "a ring over both broke, and a probe between them failed");
  }
  if (cut->second.failures == 0) cuts_.erase(cut);
}

// ------------------------------------------------------------------ reachable sets

std::vector<ConnectionId> Reachability::LargestReachable(
    const std::vector<ConnectionId>& workers) const {
  if (!has_cuts()) return workers;
  if (cached_ && asked_ == workers) return answer_;

  // Workers of a host without cuts inside it are one vertex.
  std::set<LinkEnd> apart;  // single workers with cuts
  for (const auto& [pair, cut] : cuts_) {
    if (!cut.open) continue;
    for (const LinkEnd* place : {&pair.first, &pair.second}) {
      if (!place->worker.empty()) apart.insert(*place);
    }
  }
  std::map<LinkEnd, int> numbers;
  std::vector<ReachVertex> vertices;
  std::vector<ConnectionId> samples;  // by vertex
  std::vector<int> vertex_of;
  for (ConnectionId worker : workers) {
    const v1::Register& registration = roster_.at(worker).registration;
    const LinkEnd alone{"", registration.name()};
    const LinkEnd place = apart.count(alone) > 0 ? alone : EndOf(worker);
    const auto [found, is_new] = numbers.emplace(place, static_cast<int>(vertices.size()));
    if (is_new) {
      const std::string& host = registration.location().host();
      vertices.push_back({.host = host.empty() ? "worker " + registration.name() : "host " + host,
                          .lowest_name = registration.name()});
      samples.push_back(worker);
    }
    ReachVertex& vertex = vertices[found->second];
    vertex.memory_bytes += registration.memory_bytes();
    ++vertex.workers;
    vertex.lowest_name = std::min(vertex.lowest_name, registration.name());
    vertex_of.push_back(found->second);
  }
  for (size_t a = 0; a < vertices.size(); ++a) {
    for (size_t b = 0; b < vertices.size(); ++b) {
      vertices[a].reaches.push_back(a != b && !IsCut(samples[a], samples[b]));
    }
  }
  const std::vector<int> best = LargestReachableSet(vertices);
  asked_ = workers;
  answer_.clear();
  for (size_t i = 0; i < workers.size(); ++i) {
    if (std::binary_search(best.begin(), best.end(), vertex_of[i])) answer_.push_back(workers[i]);
  }
  cached_ = true;
  return answer_;
}

std::vector<std::string> Reachability::PartedFrom(ConnectionId worker) const {
  std::set<std::string> names;
  if (!has_cuts()) return {};
  const LinkEnd own = EndOf(worker), alone{"", roster_.NameOf(worker)};
  for (const auto& [pair, cut] : cuts_) {
    if (!cut.open) continue;
    for (const auto& [one, other] : {pair, Pair(pair.second, pair.first)}) {
      if ((one == own || one == alone) && !WorkersAt(other).empty()) names.insert(other.name());
    }
  }
  return {names.begin(), names.end()};
}

}  // namespace ringattn::server
