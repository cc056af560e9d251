// The Python face of the native part: checks arguments, releases the GIL, calls, converts. Nothing else.
//
// The only native file that knows Python. llmrun/_native.pyi describes what is defined here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <span>
#include <stdexcept>

#include "control.hpp"
#include "decode.hpp"
#include "gate.hpp"
#include "ggml_attention.hpp"
#include "ggml_kernels.hpp"
#include "limits.hpp"
#include "rows.hpp"
#include "sampler.hpp"
#include "scan.hpp"
#include "suffixes.hpp"

namespace nb = nanobind;
using llmrun::BadLogits;
using llmrun::CancelFlag;
using llmrun::Decoder;
using llmrun::DraftChoice;
using llmrun::Explanation;
using llmrun::Gate;
using llmrun::Mask;
using llmrun::Row;
using llmrun::RunRow;
using llmrun::Sampler;
using llmrun::SamplerParams;
using llmrun::Status;
using llmrun::StepCost;
using llmrun::StepShape;
using llmrun::SuffixAutomaton;
using llmrun::Watermark;
using llmrun::WatermarkCount;
using llmrun::WatermarkParams;
using nb::literals::operator""_a;

namespace {

// BadLogits -> _native.BadLogits with the token and logit at fault; payload is the Python class.
void translate_bad_logits(const std::exception_ptr& thrown, void* payload) {
    try {
        std::rethrow_exception(thrown);
    } catch (const BadLogits& error) {
        nb::handle type(static_cast<PyObject*>(payload));
        nb::object raised = type(error.what());
        raised.attr("token") = error.token;
        raised.attr("logit") = error.logit;
        PyErr_SetObject(type.ptr(), raised.ptr());
    }
}

void define_bad_logits(nb::module_& module) {
    const char* documentation = "A logit is NaN or +inf, or no logit is finite.";
    nb::object type = nb::steal(
        PyErr_NewExceptionWithDoc("llmrun._native.BadLogits", documentation, PyExc_ValueError, nullptr));
    type.attr("token") = 0;
    type.attr("logit") = 0.0;
    module.attr("BadLogits") = type;
    nb::register_exception_translator(translate_bad_logits, type.release().ptr());
}

// Gives the numbers of these names their values.
void set_numbers(SamplerParams& params, const nb::kwargs& values) {
    size_t count = 0;
    params.for_each_number([&](const char* name, auto& number) {
        if (!values.contains(name)) {
            return;
        }
        if (!nb::try_cast(values[name], number)) {
            throw nb::type_error((std::string(name) + " is not a number of its type").c_str());
        }
        ++count;
    });
    if (count != values.size()) {
        throw nb::type_error("a keyword is not the name of a sampler's parameter");
    }
}

// In the place of a constructor, for nanobind: keyword arguments become the fields of the same names.
void make_sampler(Sampler* self, int64_t vocabulary_size, uint32_t seed,
                  std::vector<std::pair<int32_t, float>> logit_bias,
                  const std::vector<std::vector<int32_t>>& dry_breakers,
                  const std::vector<std::string>& order, std::optional<WatermarkParams> watermark,
                  uint32_t remember, bool exact, const nb::kwargs& numbers) {
    if (vocabulary_size < 1 || vocabulary_size > llmrun::largest_vocabulary) {
        throw std::invalid_argument("vocabulary_size has to be between 1 and 2^24");
    }
    SamplerParams params;
    set_numbers(params, numbers);
    params.seed = seed;
    params.logit_bias = std::move(logit_bias);
    params.order = llmrun::order_from(order);
    params.watermark = std::move(watermark);
    const auto size = static_cast<int32_t>(vocabulary_size);
    new (self) Sampler(size, std::move(params), dry_breakers, exact, remember);
}

const float* logits_at(uintptr_t address) {
    if (address == 0 || address % alignof(float) != 0) {
        throw std::invalid_argument("the address of the logits is not that of a float");
    }
    return std::bit_cast<const float*>(address);
}

// None and 0 allow every token.
const uint32_t* mask_at(std::optional<uintptr_t> given) {
    const uintptr_t address = given.value_or(0);
    if (address % alignof(uint32_t) != 0) {
        throw std::invalid_argument("the address of the mask is not that of 32-bit words");
    }
    return std::bit_cast<const uint32_t*>(address);
}

std::vector<int32_t> banned_tokens(nb::handle iterable) {
    std::vector<int32_t> tokens;
    for (const nb::handle token : iterable) {
        if (!nb::try_cast(token, tokens.emplace_back())) {
            throw nb::type_error("a banned token has to be a whole number of 32 bits");
        }
    }
    return tokens;
}

int32_t sample(Sampler& sampler, uintptr_t address, std::optional<uintptr_t> allowed,
               const nb::iterable& banned, bool accept) {
    const float* logits = logits_at(address);
    const std::vector<int32_t> tokens = banned_tokens(banned);
    const Mask mask{mask_at(allowed), tokens};
    const nb::gil_scoped_release released;
    const int32_t token = sampler.sample(logits, mask);
    if (accept) {
        sampler.accept(token);
    }
    return token;
}

// The rows of one call, and what they look at, kept alive whatever another thread does to the lists meanwhile.
struct HeldRows {
    std::vector<Row> rows;
    std::vector<std::pair<nb::object, std::vector<int32_t>>> held;  // [rows.size()] sampler, banned tokens

    explicit HeldRows(size_t count) {
        rows.reserve(count);
        held.reserve(count);
    }

    void add(nb::object sampler, nb::handle address, nb::handle mask, nb::handle bans) {
        Sampler* native = nullptr;
        if (!nb::try_cast(sampler, native) || native == nullptr) {
            throw nb::type_error("every sampler has to be a Sampler");
        }
        held.emplace_back(std::move(sampler), banned_tokens(bans));
        const std::vector<int32_t>& banned = held.back().second;
        native->require_known(banned);
        const uint32_t* allowed = mask_at(nb::cast<std::optional<uintptr_t>>(mask));
        rows.push_back({native, logits_at(nb::cast<uintptr_t>(address)), {allowed, banned}});
    }
};

template <typename AnyRow>
void require_different(const std::vector<AnyRow>& rows) {
    std::vector<const Sampler*> samplers;
    for (const AnyRow& row : rows) {
        samplers.push_back(row.sampler);
    }
    std::sort(samplers.begin(), samplers.end());
    if (std::adjacent_find(samplers.begin(), samplers.end()) != samplers.end()) {
        throw std::invalid_argument("no two rows may have the same sampler");
    }
}

// (chosen, [(step, remaining, [(token, probability)])])
nb::tuple explain(const Sampler& sampler, size_t back, size_t count) {
    const Explanation explanation = [&] {
        const nb::gil_scoped_release released;
        return sampler.explain(back, count);
    }();
    nb::list steps;
    for (const auto& [name, remaining, probabilities] : explanation.steps) {
        nb::list pairs;
        for (size_t i = 0; i < probabilities.size(); ++i) {
            pairs.append(nb::make_tuple(explanation.tokens[i], probabilities[i]));
        }
        steps.append(nb::make_tuple(nb::str(name.data(), name.size()), remaining, pairs));
    }
    return nb::make_tuple(explanation.chosen, steps);
}

// [(token, status)]; nothing is sampled when an argument is wrong.
nb::list sample_rows(const nb::sequence& samplers, const nb::sequence& addresses, const nb::sequence& masks,
                     const nb::sequence& bans) {
    const size_t count = nb::len(samplers);
    if (nb::len(addresses) != count || nb::len(masks) != count || nb::len(bans) != count) {
        throw std::invalid_argument("there have to be as many addresses, masks and bans as samplers");
    }
    HeldRows held(count);
    for (size_t row = 0; row < count; ++row) {
        held.add(samplers[row], addresses[row], masks[row], bans[row]);
    }
    require_different(held.rows);
    {
        const nb::gil_scoped_release released;
        llmrun::sample_rows(held.rows);
    }
    nb::list result = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t row = 0; row < count; ++row) {
        const Row& done = held.rows[row];
        nb::tuple outcome = nb::make_tuple(done.token, static_cast<int32_t>(done.status));
        PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(row), outcome.release().ptr());
    }
    return result;
}

std::vector<std::pair<int32_t, float>> log_probabilities(Sampler& sampler, uintptr_t address, int32_t token,
                                                         size_t count) {
    const float* logits = logits_at(address);
    const nb::gil_scoped_release released;
    std::vector<std::pair<int32_t, float>> result;
    for (const auto& [id, value] : sampler.log_probabilities(logits, token, count)) {
        result.emplace_back(id, value);
    }
    return result;
}

void accept_many(Sampler& sampler, const std::vector<int32_t>& tokens) {
    const nb::gil_scoped_release released;
    sampler.accept_many(tokens);
}

// In the place of a constructor, as above.
void make_watermark(WatermarkParams* self, int64_t key, int32_t n_gram, double share, float bias) {
    new (self) WatermarkParams{key, n_gram, share, bias};
}

// (tokens judged, hits)
nb::tuple count_marks(const WatermarkParams& params, int32_t vocabulary_size, const std::vector<int32_t>& tokens,
                      bool repeats) {
    const WatermarkCount counted = [&] {
        const nb::gil_scoped_release released;
        return Watermark(vocabulary_size, params, false).count(tokens, repeats);
    }();
    return nb::make_tuple(counted.judged, counted.hits);
}

void define_watermark(nb::module_& module) {
    nb::class_<WatermarkParams>(module, "Watermark", "A mark that a key leaves in the choice of tokens.")
        .def("__init__", make_watermark, "key"_a, nb::kw_only(), "n_gram"_a = 0, "share"_a = 0.25, "bias"_a = 2.0f)
        .def("count", count_marks, "vocabulary_size"_a, "tokens"_a, "repeats"_a = false);
    module.def("permuted", llmrun::permuted, "seed"_a, "size"_a, "count"_a);
}

void define_sampler(nb::module_& module) {
    const SamplerParams defaults;
    nb::class_<Sampler>(module, "Sampler", "One sequence's sampler chain: llama.cpp's, token for token.")
        .def("__init__", make_sampler, "vocabulary_size"_a, nb::kw_only(), "seed"_a = defaults.seed,
             "logit_bias"_a = defaults.logit_bias, "dry_breakers"_a = std::vector<std::vector<int32_t>>{},
             "order"_a = std::vector<std::string>(llmrun::step_names.begin(), llmrun::step_names.end()),
             "watermark"_a = nb::none(), "remember"_a = 0, "exact"_a = false, "numbers"_a)
        .def("sample", sample, "address"_a, "allowed"_a = nb::none(), "banned"_a = nb::tuple(), "accept"_a = false)
        .def("accept", &Sampler::accept, "token"_a)
        .def("accept_many", accept_many, "tokens"_a)
        .def("rewind", [](Sampler& sampler, size_t dropped,
                          const std::vector<int32_t>& tokens) { sampler.rewind(dropped, tokens); },
             "dropped"_a, "tokens"_a)
        .def("undraw", &Sampler::undraw, "count"_a)
        .def("explain", explain, "back"_a, "count"_a)
        .def("copy", [](const Sampler& sampler) { return Sampler(sampler); })
        .def("log_probabilities", log_probabilities, "address"_a, "token"_a, "count"_a)
        .def("random_state", &Sampler::random_state)
        .def_prop_ro("exact_count", &Sampler::exact_count)
        .def_prop_ro("bytes_read", &Sampler::bytes_read)
        .def_prop_ro("vocabulary_size", &Sampler::vocabulary_size);
    module.def("sample_rows", sample_rows, "samplers"_a, "addresses"_a, "masks"_a, "bans"_a);
    nb::enum_<Status>(module, "Status", nb::is_arithmetic(), "What became of a row of sample_rows().")
        .value("CHOSEN", Status::chosen)
        .value("NOT_A_NUMBER", Status::not_a_number)
        .value("INFINITE", Status::infinite)
        .value("IMPOSSIBLE", Status::impossible)
        .value("NO_MEMORY", Status::no_memory);
    module.attr("cpu_level") = llmrun::loops().level;
}

void define_control(nb::module_& module) {
    nb::class_<CancelFlag>(module, "CancelFlag", "Stops llama.cpp's work, and shows how far a load has come.")
        .def(nb::init<>())
        .def("set", [](CancelFlag& flag) { flag.cancelled = true; })
        .def("clear", [](CancelFlag& flag) { flag.cancelled = false; })
        .def_prop_ro("is_set", [](const CancelFlag& flag) { return flag.cancelled.load(); })
        .def_prop_ro("progress", [](const CancelFlag& flag) { return flag.progress.load(); })
        .def_prop_ro("n_computed", [](const CancelFlag& flag) { return flag.n_computed.load(); })
        .def_prop_rw(
            "layer", [](const CancelFlag& flag) { return flag.layer.load(); },
            [](CancelFlag& flag, int layer) { flag.layer = layer; })
        .def_prop_ro("address", [](const CancelFlag& flag) { return std::bit_cast<uintptr_t>(&flag); });
    module.attr("abort_callback_address") = std::bit_cast<uintptr_t>(&llmrun::llmrun_abort_callback);
    module.attr("eval_callback_address") = std::bit_cast<uintptr_t>(&llmrun::llmrun_eval_callback);
    module.attr("progress_callback_address") = std::bit_cast<uintptr_t>(&llmrun::llmrun_progress_callback);
    module.attr("log_callback_address") = std::bit_cast<uintptr_t>(&llmrun::llmrun_log_callback);
    module.def("graph_nodes", &llmrun::graph_nodes);
    module.def(
        "exit_when_closed",
        [](int fd) {
            const int problem = llmrun::exit_when_closed(fd);
            if (problem != 0) {
                errno = problem;
                PyErr_SetFromErrno(PyExc_OSError);
                throw nb::python_error();
            }
        },
        "fd"_a);
}

// [((sampled, ...), decode seconds, seconds)]
nb::list steps_of(const llmrun::Run& run, size_t n_rows) {
    nb::list done;
    for (size_t step = 0; step < run.steps.size(); ++step) {
        nb::tuple sampled = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(n_rows)));
        for (size_t row = 0; row < n_rows; ++row) {
            nb::object token = nb::cast(run.sampled[step * n_rows + row]);
            PyTuple_SET_ITEM(sampled.ptr(), static_cast<Py_ssize_t>(row), token.release().ptr());
        }
        done.append(nb::make_tuple(sampled, run.steps[step].decode_seconds, run.steps[step].seconds));
    }
    return done;
}

// (decode status, number of steps, [failed row], steps that were not taken)
nb::tuple decode_run(const Decoder& decoder, uintptr_t context, uintptr_t vocabulary, uintptr_t batch,
                     const nb::sequence& asked, size_t steps, double seconds, const CancelFlag& interrupted,
                     const nb::object& take, bool overlaps) {
    std::vector<RunRow> rows;
    for (const nb::handle row : asked) {
        const nb::handle entry = row[0];
        rows.push_back({&nb::cast<Sampler&>(row[1]), nb::cast<int32_t>(entry[0]), nb::cast<int32_t>(entry[1]),
                        nb::cast<int32_t>(entry[2]), nb::cast<SuffixAutomaton*>(row[2]), nb::cast<Gate*>(row[3])});
    }
    require_different(rows);
    llmrun::RunLimits limits{steps, seconds, interrupted.cancelled, {}, overlaps};
    if (!take.is_none()) {
        limits.take = [&](const llmrun::Run& run) {
            const nb::gil_scoped_acquire acquired;
            return nb::cast<double>(take(steps_of(run, rows.size())));
        };
    }
    const llmrun::Run run = [&] {
        const nb::gil_scoped_release released;
        return llmrun::decode_run(decoder, std::bit_cast<void*>(context), std::bit_cast<const void*>(vocabulary),
                                  *std::bit_cast<llmrun::LlamaBatch*>(batch), rows, limits);
    }();
    return nb::make_tuple(run.decode_status, run.n_steps, run.failed, steps_of(run, rows.size()));
}

void define_decoder(nb::module_& module) {
    nb::class_<Decoder>(module, "Decoder", "Decodes and samples without the interpreter.")
        .def(
            "__init__",
            [](Decoder* self, uintptr_t decode, uintptr_t logits, uintptr_t is_end) {
                new (self) Decoder{std::bit_cast<decltype(Decoder::decode)>(decode),
                                   std::bit_cast<decltype(Decoder::logits)>(logits),
                                   std::bit_cast<decltype(Decoder::is_end)>(is_end)};
            },
            "decode"_a, "logits"_a, "is_end"_a)
        .def("run", decode_run, "context"_a, "vocabulary"_a, "batch"_a, "rows"_a, "steps"_a, "seconds"_a,
             "interrupted"_a, "take"_a.none() = nb::none(), "overlaps"_a = false);
}

// As llmrun::tokens_where(), without the GIL.
template <class Test>
std::vector<int32_t> tokens_where(int32_t n_tokens, Test test) {
    const nb::gil_scoped_release released;
    return llmrun::tokens_where(n_tokens, test);
}

uint64_t skip_strings(nb::handle data, uint64_t position, uint64_t count) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) {
        throw nb::python_error();
    }
    const std::span bytes{static_cast<const unsigned char*>(view.buf), static_cast<size_t>(view.len)};
    const uint64_t end = llmrun::skip_strings(bytes, position, count);
    PyBuffer_Release(&view);
    return end;
}

void define_vocabulary(nb::module_& module) {
    module.def("skip_strings", skip_strings, "data"_a, "position"_a, "count"_a);
    module.def(
        "end_tokens",
        [](uintptr_t is_end, uintptr_t vocabulary, int32_t n_tokens) {
            const auto test = std::bit_cast<decltype(Decoder::is_end)>(is_end);
            return tokens_where(n_tokens, [=](int32_t token) {
                return test(std::bit_cast<const void*>(vocabulary), token);
            });
        },
        "is_end"_a, "vocabulary"_a, "n_tokens"_a);
    module.def(
        "tokens_with",
        [](uintptr_t attributes, uintptr_t vocabulary, int32_t n_tokens, int32_t bits) {
            const auto of = std::bit_cast<int32_t (*)(const void*, int32_t)>(attributes);
            return tokens_where(n_tokens, [=](int32_t token) {
                return (of(std::bit_cast<const void*>(vocabulary), token) & bits) != 0;
            });
        },
        "attributes"_a, "vocabulary"_a, "n_tokens"_a, "bits"_a);
}

void define_suffixes(nb::module_& module) {
    nb::class_<SuffixAutomaton>(module, "SuffixAutomaton", "What followed when the end of a sequence occurred before.")
        .def(nb::init<>())
        .def(
            "extend",
            [](SuffixAutomaton& automaton, const std::vector<int32_t>& tokens) {
                const nb::gil_scoped_release released;
                automaton.extend(tokens);
            },
            "tokens"_a)
        .def("rewind", &SuffixAutomaton::rewind, "length"_a)
        .def("draft", &SuffixAutomaton::draft, "most"_a)
        .def_prop_ro("draft_begin", &SuffixAutomaton::draft_begin)
        .def("__len__", &SuffixAutomaton::size);
}

using Costs = std::vector<std::pair<int32_t, double>>;

std::vector<StepCost> costs_of(const Costs& costs) {
    std::vector<StepCost> found;
    for (const auto& [width, cost] : costs) {
        found.push_back({width, cost});
    }
    return found;
}

void define_gate(nb::module_& module) {
    nb::class_<StepShape>(module, "StepShape", "A decode step to which a draft may be added.")
        .def(
            "__init__",
            [](StepShape* self, int32_t rows, int32_t sampled) {
                new (self) StepShape{rows, sampled};
            },
            "rows"_a, "sampled"_a)
        .def_ro("rows", &StepShape::rows)
        .def_ro("sampled", &StepShape::sampled);
    nb::class_<DraftChoice>(module, "DraftChoice", "A number of tokens to draft.")
        .def_ro("length", &DraftChoice::length)
        .def_ro("rate", &DraftChoice::rate)
        .def_ro("waits", &DraftChoice::waits);
    nb::class_<Gate> gate(module, "Gate", "The draft lengths of one answer.");
    gate.attr("MODEL") = Gate::model;
    gate.def(
            "__init__",
            [](Gate* self, int32_t most, const Costs& costs, const Costs& draft_costs, bool always) {
                new (self) Gate(most, costs_of(costs), costs_of(draft_costs), always);
            },
            "most"_a, "costs"_a, "draft_costs"_a, "always"_a = false)
        .def(
            "set_costs",
            [](Gate& self, const Costs& costs, const Costs& draft_costs) {
                self.set_costs(costs_of(costs), costs_of(draft_costs));
            },
            "costs"_a, "draft_costs"_a)
        .def_prop_ro("n_compared", &Gate::n_compared)
        .def_prop_ro("planned_cost", &Gate::planned_cost)
        .def_prop_ro("speedup", &Gate::speedup)
        .def("credit", &Gate::credit, "match"_a, "step"_a)
        .def("choose", &Gate::choose, "match"_a, "limit"_a, "step"_a)
        .def("expected", &Gate::expected, "match"_a, "length"_a)
        .def("draft_cost", &Gate::draft_cost, "step"_a, "length"_a)
        .def("is_worth_prefill", &Gate::is_worth_prefill, "n_tokens"_a, "step"_a)
        .def("learn", &Gate::learn, "match"_a, "n_accepted"_a, "missed"_a)
        .def("learn_sureness", &Gate::learn_sureness, "sure"_a)
        .def("record_step", &Gate::record_step, "match"_a, "step"_a, "n_drafted"_a, "n_accepted"_a, "drafting"_a = 0.0)
        .def("plan", &Gate::plan, "drafted"_a, "match"_a, "step"_a, "limit"_a)
        .def("add_model_draft", &Gate::add_model_draft, "drafted"_a)
        .def("set_length", &Gate::set_length, "length"_a, "drafting"_a)
        .def(
            "compare", [](Gate& gate, const std::vector<int32_t>& tokens) { gate.compare(tokens); }, "tokens"_a)
        .def("forget", &Gate::forget);
}

void define_limits(nb::module_& module) {
    module.def("read_rate", llmrun::read_rate, "n_bytes"_a, "threads"_a, "seconds"_a,
               nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "multiply_add_rate",
        [](const std::string& kind, unsigned threads, double seconds) {
            const nb::gil_scoped_release released;
            return llmrun::multiply_add_rate(kind, threads, seconds);
        },
        "kind"_a, "threads"_a, "seconds"_a);
}

}  // namespace

void install_kernels(uintptr_t buffer_type, uintptr_t is_host, uintptr_t barrier, const std::string& name) {
    const llmrun::ggml::Functions functions{reinterpret_cast<bool (*)(void*)>(is_host), reinterpret_cast<void (*)(void*)>(barrier)};
    for (const llmrun::MatmulKernels& kernels : llmrun::available_matmul_kernels()) {
        if (name == kernels.name) {
            return llmrun::ggml::install(reinterpret_cast<void*>(buffer_type), functions, kernels);
        }
    }
    throw std::invalid_argument("this processor has no such kernels");
}

void define_kernels(nb::module_& module) {
    module.def(
        "available_kernels",
        [] {
            std::vector<std::string> names;
            for (const llmrun::MatmulKernels& kernels : llmrun::available_matmul_kernels()) {
                names.emplace_back(kernels.name);
            }
            return names;
        },
        "Return the instruction sets that our kernels can use here, the best one last.");
    module.def("install_kernels", install_kernels, "buffer_type"_a, "is_host"_a, "barrier"_a, "name"_a,
               "Let our kernels compute what they can for a ggml extra buffer type, once.");
    module.def("enable_kernels", llmrun::ggml::enable, "are_on"_a, "Switch the installed kernels on or off.");
    module.def("products_computed", llmrun::ggml::computed, "Return the number of products our kernels have computed.");
    module.def(
        "can_attend",
        [](int key_type, int value_type, int64_t key_length, int64_t value_length) {
            const auto& available = llmrun::available_matmul_kernels();
            return !available.empty() && llmrun::attention_kernels(available.back()).of(key_type, value_type, key_length, value_length);
        },
        "key_type"_a, "value_type"_a, "key_length"_a, "value_length"_a, "Return whether our kernels compute attention of these types and lengths.");
    module.def("attentions_computed", llmrun::ggml::FlashAttention::computed, "Return the number of attention operations ours have computed.");
}

NB_MODULE(_native, module) {
    define_bad_logits(module);
    define_watermark(module);
    define_sampler(module);
    define_control(module);
    define_limits(module);
    define_kernels(module);
    define_decoder(module);
    define_vocabulary(module);
    define_suffixes(module);
    define_gate(module);
}
