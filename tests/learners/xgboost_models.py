"""Models of XGBoost 3.2 in its own JSON (what is not read is left out), and what they predict, written by XGBoost."""

from __future__ import annotations

import numpy as np

_I = np.arange(40)
X = np.stack([np.sin(_I * 1.7), np.cos(_I * 0.9), np.sin(_I * 0.37) * 2], axis=1).astype(np.float32)
X[::9, 1] = np.nan  # missing values

# predict of the first rows
MULTICLASS_PREDICTIONS = [
    [0.227327377, 0.62172538, 0.150947228],
    [0.178400114, 0.408125669, 0.413474262],
    [0.242632911, 0.636985838, 0.120381221],
    [0.492843777, 0.397334158, 0.109822027],
    [0.213960499, 0.655016422, 0.131023079],
    [0.268788397, 0.590258896, 0.140952736],
]
MULTICLASS = (
    '{"learner":{"attributes":{},"feature_names":[],"feature_types":[],"gradient_booster":{"model":{"gbtr'
    'ee_model_param":{"num_parallel_tree":"1","num_trees":"6"},"iteration_indptr":[0,3,6],"tree_info":[0,'
    '1,2,0,1,2],"trees":[{"default_left":[0,0,0,0,0,0,0],"left_children":[1,3,5,-1,-1,-1,-1],"right_child'
    'ren":[2,4,6,-1,-1,-1,-1],"split_conditions":[-0.29213881,0.18911462,0.5675586,0.4265865,-0.11269215,'
    '-0.031054312,-0.18277225],"split_indices":[1,0,1,0,0,0,0],"split_type":[0,0,0,0,0,0,0],"tree_param":'
    '{"num_deleted":"0","num_feature":"3","num_nodes":"7","size_leaf_vector":"1"}},{"default_left":[0,0,0'
    ',0,0],"left_children":[1,-1,3,-1,-1],"right_children":[2,-1,4,-1,-1],"split_conditions":[-1.6013336,'
    '0.2116464,0.735921,-0.18694323,0.06357249],"split_indices":[2,0,2,0,0],"split_type":[0,0,0,0,0],"tre'
    'e_param":{"num_deleted":"0","num_feature":"3","num_nodes":"5","size_leaf_vector":"1"}},{"default_lef'
    't":[0,0,0,0,0],"left_children":[1,-1,3,-1,-1],"right_children":[2,-1,4,-1,-1],"split_conditions":[0.'
    '35905835,-0.15889043,-0.16123797,-0.13129574,0.573437],"split_indices":[0,0,1,0,0],"split_type":[0,0'
    ',0,0,0],"tree_param":{"num_deleted":"0","num_feature":"3","num_nodes":"5","size_leaf_vector":"1"}},{'
    '"default_left":[0,0,0,0,0,0,0],"left_children":[1,3,5,-1,-1,-1,-1],"right_children":[2,4,6,-1,-1,-1,'
    '-1],"split_conditions":[-0.29213881,0.18911462,0.5675586,0.31248912,-0.10375891,-0.030314917,-0.1700'
    '2225],"split_indices":[1,0,1,0,0,0,0],"split_type":[0,0,0,0,0,0,0],"tree_param":{"num_deleted":"0","'
    'num_feature":"3","num_nodes":"7","size_leaf_vector":"1"}},{"default_left":[0,0,0,0,0,0,0],"left_chil'
    'dren":[1,3,5,-1,-1,-1,-1],"right_children":[2,4,6,-1,-1,-1,-1],"split_conditions":[-0.29213881,0.189'
    '11462,0.35905835,-0.23305674,0.14569996,0.14711067,-0.031450342],"split_indices":[1,0,0,0,0,0,0],"sp'
    'lit_type":[0,0,0,0,0,0,0],"tree_param":{"num_deleted":"0","num_feature":"3","num_nodes":"7","size_le'
    'af_vector":"1"}},{"default_left":[0,0,0,0,0],"left_children":[1,-1,3,-1,-1],"right_children":[2,-1,4'
    ',-1,-1],"split_conditions":[0.35905835,-0.15138176,-0.16123797,-0.12359003,0.36631814],"split_indice'
    's":[0,0,1,0,0],"split_type":[0,0,0,0,0],"tree_param":{"num_deleted":"0","num_feature":"3","num_nodes'
    '":"5","size_leaf_vector":"1"}}]},"name":"gbtree"},"learner_model_param":{"base_score":"[-8.038747E-2'
    ',6.1275786E-1,-5.323707E-1]","boost_from_average":"1","num_class":"3","num_feature":"3","num_target"'
    ':"1"},"objective":{"name":"multi:softprob","softmax_multiclass_param":{"num_class":"3"}}},"version":'
    "[3,2,0]}"
)

# predict of the first rows
BINARY_PREDICTIONS = [
    [0.16892767, 0.83107233],
    [0.16892767, 0.83107233],
    [0.255763948, 0.744236052],
    [0.55178988, 0.44821015],
    [0.219912887, 0.780087113],
    [0.211339712, 0.788660288],
]
BINARY = (
    '{"learner":{"attributes":{},"feature_names":[],"feature_types":[],"gradient_booster":{"model":{"gbtr'
    'ee_model_param":{"num_parallel_tree":"1","num_trees":"2"},"iteration_indptr":[0,1,2],"tree_info":[0,'
    '0],"trees":[{"default_left":[0,0,0,0,0,0,0],"left_children":[1,3,5,-1,-1,-1,-1],"right_children":[2,'
    '4,6,-1,-1,-1,-1],"split_conditions":[-0.29213881,0.18911462,0.5675586,-0.7005145,0.15486899,0.050995'
    '283,0.32737243],"split_indices":[1,0,1,0,0,0,0],"split_type":[0,0,0,0,0,0,0],"tree_param":{"num_dele'
    'ted":"0","num_feature":"3","num_nodes":"7","size_leaf_vector":"1"}},{"default_left":[0,0,0,0,0,0,0],'
    '"left_children":[1,3,5,-1,-1,-1,-1],"right_children":[2,4,6,-1,-1,-1,-1],"split_conditions":[-0.2921'
    '3881,0.18911462,-0.14899902,-0.47679135,0.1419042,0.04770696,0.29647267],"split_indices":[1,0,0,0,0,'
    '0,0],"split_type":[0,0,0,0,0,0,0],"tree_param":{"num_deleted":"0","num_feature":"3","num_nodes":"7",'
    '"size_leaf_vector":"1"}}]},"name":"gbtree"},"learner_model_param":{"base_score":"[7.25E-1]","boost_f'
    'rom_average":"1","num_class":"0","num_feature":"3","num_target":"1"},"objective":{"name":"binary:log'
    'istic","reg_loss_param":{"scale_pos_weight":"1"}}},"version":[3,2,0]}'
)

# predict of the first rows
REGRESSION_PREDICTIONS = [
    [0.947715938, 1.052284],
    [1.40170312, 0.598296821],
    [0.473062456, 1.5269376],
    [0.473062456, 1.5269376],
    [0.947107434, 1.05289257],
    [0.947107434, 1.05289257],
]
REGRESSION = (
    '{"learner":{"attributes":{},"feature_names":[],"feature_types":[],"gradient_booster":{"model":{"gbtr'
    'ee_model_param":{"num_parallel_tree":"1","num_trees":"4"},"iteration_indptr":[0,2,4],"tree_info":[0,'
    '1,0,1],"trees":[{"default_left":[0,0,0,0,0,0,0],"left_children":[1,3,5,-1,-1,-1,-1],"right_children"'
    ':[2,4,6,-1,-1,-1,-1],"split_conditions":[0.5675586,0.18911462,0.21598727,-0.2475,0.027272737,0.02769'
    '2316,0.28875002],"split_indices":[1,0,0,0,0,0,0],"split_type":[0,0,0,0,0,0,0],"tree_param":{"num_del'
    'eted":"0","num_feature":"3","num_nodes":"7","size_leaf_vector":"1"}},{"default_left":[0,0,0,0,0,0,0]'
    ',"left_children":[1,3,5,-1,-1,-1,-1],"right_children":[2,4,6,-1,-1,-1,-1],"split_conditions":[0.5675'
    '586,0.18911462,0.21598727,0.2475,-0.027272737,-0.027692316,-0.28875002],"split_indices":[1,0,0,0,0,0'
    ',0],"split_type":[0,0,0,0,0,0,0],"tree_param":{"num_deleted":"0","num_feature":"3","num_nodes":"7","'
    'size_leaf_vector":"1"}},{"default_left":[0,0,0,0,0,0,0],"left_children":[1,3,5,-1,-1,-1,-1],"right_c'
    'hildren":[2,4,6,-1,-1,-1,-1],"split_conditions":[0.5675586,0.18911462,0.21598727,-0.1794375,0.019834'
    '708,0.020023672,0.21295314],"split_indices":[1,0,0,0,0,0,0],"split_type":[0,0,0,0,0,0,0],"tree_param'
    '":{"num_deleted":"0","num_feature":"3","num_nodes":"7","size_leaf_vector":"1"}},{"default_left":[0,0'
    ',0,0,0,0,0],"left_children":[1,3,5,-1,-1,-1,-1],"right_children":[2,4,6,-1,-1,-1,-1],"split_conditio'
    'ns":[0.5675586,0.18911462,0.21598727,0.17943749,-0.019834723,-0.020023672,-0.21295314],"split_indice'
    's":[1,0,0,0,0,0,0],"split_type":[0,0,0,0,0,0,0],"tree_param":{"num_deleted":"0","num_feature":"3","n'
    'um_nodes":"7","size_leaf_vector":"1"}}]},"name":"gbtree"},"learner_model_param":{"base_score":"[9E-1'
    ',1.1E0]","boost_from_average":"1","num_class":"0","num_feature":"3","num_target":"2"},"objective":{"'
    'name":"reg:squarederror","reg_loss_param":{"scale_pos_weight":"1"}}},"version":[3,2,0]}'
)
