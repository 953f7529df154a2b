/* A selector: tenants share by weight.
 *
 * The tenant is the part of a partition's name before the separator. Deficit round robin:
 * every tenant that has work is credited with its weight, the one with the highest credit
 * is tried first and pays for the messages that the pop takes of it. A tenant without work
 * is credited nothing. The credits are kept in the broker's `state`, so all pops of a
 * (queue, group) on a broker share them.
 *
 * Settings:
 * - `weights`: `gold=3,silver=2`; others have the weight 1. At most 64, of 1 to 1000.
 * - `separator` (`:`): one character. A name without it is a tenant of its own.
 */
#include <stdlib.h>
#include <string.h>

#include "selector.h"

#define MAX_WEIGHTS 64
#define MAX_NAME 255
/* Credit of a round per unit of weight, in messages. */
#define QUANTUM 1

typedef exports_waspmq_plugin_candidate_selector_request_t request_t;
typedef exports_waspmq_plugin_candidate_selector_candidate_t candidate_t;

static struct weight {
    char name[MAX_NAME];
    size_t length;
    int64_t weight;
} weights[MAX_WEIGHTS];
static size_t weight_count = 0;
static char separator = ':';

static bool fail(selector_string_t *err, const char *text) {
    selector_string_dup(err, text);
    return false;
}

static bool text_is(selector_string_t text, const char *expected) {
    return text.len == strlen(expected) && memcmp(text.ptr, expected, text.len) == 0;
}

static bool parse_weights(selector_string_t text, selector_string_t *err) {
    size_t at = 0;
    while (at < text.len) {
        size_t end = at;
        while (end < text.len && text.ptr[end] != ',') end++;
        size_t equals = end;
        while (equals > at && text.ptr[equals - 1] != '=') equals--;
        /* `equals` is behind the last '=' of the pair. */
        if (equals <= at + 1 || equals == end || equals - 1 - at > MAX_NAME)
            return fail(err, "weights must be NAME=NUMBER,...");
        int64_t number = 0;
        for (size_t i = equals; i < end; i++) {
            if (text.ptr[i] < '0' || text.ptr[i] > '9' || number > 1000)
                return fail(err, "a weight must be a whole number from 1 to 1000");
            number = number * 10 + (text.ptr[i] - '0');
        }
        if (number < 1 || number > 1000) return fail(err, "a weight must be a whole number from 1 to 1000");
        if (weight_count == MAX_WEIGHTS) return fail(err, "at most 64 weights");
        struct weight *weight = &weights[weight_count++];
        weight->length = equals - 1 - at;
        memcpy(weight->name, text.ptr + at, weight->length);
        weight->weight = number;
        at = end + 1;
    }
    return true;
}

bool exports_waspmq_plugin_candidate_selector_init(selector_list_tuple2_string_string_t *settings,
                                                   selector_string_t *err) {
    weight_count = 0;
    separator = ':';
    for (size_t i = 0; i < settings->len; i++) {
        selector_string_t key = settings->ptr[i].f0, value = settings->ptr[i].f1;
        if (text_is(key, "weights")) {
            if (!parse_weights(value, err)) return false;
        } else if (text_is(key, "separator")) {
            if (value.len != 1) return fail(err, "separator must be one character");
            separator = (char)value.ptr[0];
        } else {
            return fail(err, "fair-share has the settings weights and separator");
        }
    }
    return true;
}

struct tenant {
    const uint8_t *name;
    size_t length;
    int64_t weight;
    /* Messages it may be given before it is another one's turn. */
    int64_t credit;
    /* The same, as the broker has it. */
    int64_t stored;
    /* Its candidates that are not placed yet: indices in the order of the window. */
    uint32_t next;
    uint32_t left;
};

static int64_t weight_of(const struct tenant *tenant) {
    for (size_t i = 0; i < weight_count; i++)
        if (weights[i].length == tenant->length && memcmp(weights[i].name, tenant->name, tenant->length) == 0)
            return weights[i].weight;
    return 1;
}

/* The state's key of a tenant. The caller owns the memory. */
static selector_string_t key_of(const struct tenant *tenant) {
    selector_string_t key = {malloc(tenant->length + 2), tenant->length + 2};
    memcpy(key.ptr, "c:", 2);
    memcpy(key.ptr + 2, tenant->name, tenant->length);
    return key;
}

static int64_t add_credit(const struct tenant *tenant, int64_t by) {
    selector_string_t key = key_of(tenant), error;
    int64_t sum = 0;
    /* Without room in the state the tenant starts anew with every pop: still fair within it. */
    if (!waspmq_plugin_state_increment(&key, by, &sum, &error)) {
        selector_string_free(&error);
        sum = 0;
    }
    free(key.ptr);
    return sum;
}

/* The tenant of a candidate, found or made. */
static uint32_t tenant_of(struct tenant *tenants, uint32_t *count, const candidate_t *candidate) {
    struct tenant tenant = {candidate->partition.ptr, 0, 0, 0, 0, 0, 0};
    while (tenant.length < candidate->partition.len && candidate->partition.ptr[tenant.length] != (uint8_t)separator)
        tenant.length++;
    for (uint32_t i = 0; i < *count; i++)
        if (tenants[i].length == tenant.length && memcmp(tenants[i].name, tenant.name, tenant.length) == 0) return i;
    tenant.weight = weight_of(&tenant);
    tenant.stored = tenant.credit = add_credit(&tenant, 0);
    tenants[*count] = tenant;
    return (*count)++;
}

bool exports_waspmq_plugin_candidate_selector_select(request_t *request,
                                                     exports_waspmq_plugin_candidate_selector_list_candidate_t *candidates,
                                                     selector_list_u32_t *ret, selector_string_t *err) {
    (void)err;
    uint32_t count = (uint32_t)candidates->len, tenant_count = 0;
    struct tenant *tenants = calloc(count, sizeof *tenants);
    uint32_t *of = calloc(count, sizeof *of);
    bool *placed = calloc(count, sizeof *placed);
    ret->ptr = calloc(count, sizeof *ret->ptr);
    ret->len = count;
    for (uint32_t i = 0; i < count; i++) {
        of[i] = tenant_of(tenants, &tenant_count, &candidates->ptr[i]);
        tenants[of[i]].left++;
    }
    int64_t taken = 0;
    for (uint32_t at = 0; at < count; at++) {
        struct tenant *best = NULL;
        for (uint32_t i = 0; i < tenant_count; i++)
            if (tenants[i].left > 0 && (best == NULL || tenants[i].credit > best->credit)) best = &tenants[i];
        /* Nobody has credit: as many rounds as it takes until somebody has. */
        if (best->credit <= 0) {
            int64_t rounds = INT64_MAX;
            for (uint32_t i = 0; i < tenant_count; i++)
                if (tenants[i].left > 0) {
                    int64_t needed = -tenants[i].credit / (tenants[i].weight * QUANTUM) + 1;
                    if (needed < rounds) rounds = needed;
                }
            for (uint32_t i = 0; i < tenant_count; i++)
                if (tenants[i].left > 0) tenants[i].credit += rounds * tenants[i].weight * QUANTUM;
            for (uint32_t i = 0; i < tenant_count; i++)
                if (tenants[i].left > 0 && tenants[i].credit > best->credit) best = &tenants[i];
        }
        uint32_t which = (uint32_t)(best - tenants);
        uint32_t index = best->next;
        while (placed[index] || of[index] != which) index++;
        best->next = index + 1;
        placed[index] = true;
        best->left--;
        ret->ptr[at] = index;
        int64_t room = (int64_t)request->batch - taken;
        int64_t cost = candidates->ptr[index].backlog < (uint64_t)room ? (int64_t)candidates->ptr[index].backlog : room;
        taken += cost;
        best->credit -= cost;
        /* The pop ends here: what follows is only the order to fall back on. */
        if (taken >= request->batch || at + 1 >= request->partitions || at + 1 == count) {
            for (uint32_t i = 0; i < tenant_count; i++)
                if (tenants[i].credit != tenants[i].stored) add_credit(&tenants[i], tenants[i].credit - tenants[i].stored);
            uint32_t rest = at + 1;
            for (uint32_t i = 0; i < count; i++)
                if (!placed[i]) ret->ptr[rest++] = i;
            break;
        }
    }
    free(tenants);
    free(of);
    free(placed);
    exports_waspmq_plugin_candidate_selector_request_free(request);
    exports_waspmq_plugin_candidate_selector_list_candidate_free(candidates);
    return true;
}
